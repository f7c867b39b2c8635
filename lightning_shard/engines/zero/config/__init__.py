"""DeepSpeed's configuration: typed fields and a user's JSON file in, one checked mapping out.

`DeepSpeedFields` is what a user sets, of which `read_settings` makes `ZeroSettings`; `RunFacts` is what the run says,
and `deepspeed_config` puts both together. DeepSpeed is imported by the functions that ask it for its keys.
"""
