"""Words that engines and checkpoints share; nothing here imports Lightning."""
