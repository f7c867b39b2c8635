"""Words that engines and checkpoints share; nothing here imports Lightning.

- `names`: the FQNs of a module's parameters and buffers, whatever wraps it.
- `flat`: what a rank has of tensors whose slices lie in flat memory, as in ZeRO's partitions.
- `full`: full tensors gathered from the shards of all ranks, and scattered back into them.
- `fake`: tensors without memory, on which a step is traced; `tracing`: what follows a step's operators.
- `masters`: the master weights of a module, found from its parameters.
- `clipping`: the gradient norm and clipping by one formula, however gradients are sharded.
"""
