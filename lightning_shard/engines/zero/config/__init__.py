"""DeepSpeed's configuration: `read_settings` checks typed fields and a file, `deepspeed_config` adds a run's values."""
