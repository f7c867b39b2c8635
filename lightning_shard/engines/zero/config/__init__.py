"""DeepSpeed's configuration: typed fields and a user's JSON file in, one checked mapping out.

`read_settings` checks a user's `DeepSpeedFields` and returns `ZeroSettings`. `deepspeed_config` combines them with
`RunFacts`, the values of the run. DeepSpeed is imported by the functions that ask it for its keys.
"""
