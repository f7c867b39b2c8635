"""What a run will need, before it runs: bytes per rank, bytes over the network and time, without Lightning.

A contents page: `facts` is what is known of a model and an optimizer (of an engine: `lightning_shard.engines.facts`;
what an optimizer keeps is seen on a step without data). `predict` turns them into the bytes of a rank at the points
of a step and into what it sends, by one module per engine (`torch_ddp`, `fully_shard`, `zero`).
`memory_trace` runs a step on tensors without data and finds its activations. `planner` asks what fits, `traffic` how
long collectives take; `report` shows it. The command is ``lightning_shard/commands/plan.py``.
"""
