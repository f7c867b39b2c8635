"""What a run will need, before it runs: bytes per rank, bytes over the network and time, without Lightning.

A contents page: `facts` is what is known of a model and an optimizer (of an engine: `lightning_shard.engines.facts`;
of an optimizer before its first step: `optimizer_facts`). `predict` turns them into the bytes of a rank at the points
of a step and into what it sends, by one module per engine (`torch_ddp`, `replicate`, `fully_shard`, `zero`).
`memory_trace` runs a step on tensors without data and finds its activations. `largest_batch` asks what fits, `traffic`
how long collectives take; `report` and `picture` show it. The command is ``lightning_shard/commands/plan.py``.
"""
