"""DeepSpeed's configuration: typed fields and a user's JSON file in, one checked mapping out.

`DeepSpeedFields` is what a user sets, `check_fields` refuses what can't work before anything is started, `RunFacts` is
what the run says, and `deepspeed_config` puts both together. DeepSpeed is imported inside the functions that ask it
for its keys.
"""
