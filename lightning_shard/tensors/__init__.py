"""Types and functions of tensors that engines and checkpoints share."""
