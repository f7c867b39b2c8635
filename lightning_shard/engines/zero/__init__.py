"""DeepSpeed's engine behind plain functions: nothing here imports Lightning, and nothing imports DeepSpeed early."""
