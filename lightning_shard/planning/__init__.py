"""What a run will need, before it runs: bytes per rank, bytes over the network and time, without Lightning.

A contents page: `facts` is what is known of a model, an engine and an optimizer; `states` turns it into bytes per rank
(`fsdp_states`, `zero_states` and the files beside it: engine by engine). `trace` runs a step on tensors without data
(`fake`, `live`), and `walk` puts both together: what a rank holds at each part of a step. `fitting` asks what fits,
`traffic` what is sent and how long that takes; `report` and `picture` show it. `lightning-shard plan` is
`lightning_shard.commands.plan`.
"""
