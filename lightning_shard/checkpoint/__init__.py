"""Portable checkpoints: one on-disk form for every engine, mesh and number of ranks; nothing here imports Lightning.

- `save`: what there is to save of a module and its optimizers, and writing it; `background` saves while training goes
  on. `plan` says which rank writes which boxes.
- `load`: finding and opening a checkpoint, once, and reading it into live tensors; `load_optimizers` fits optimizer
  state by name, `matching` tells what does not fit.
- `module_state`, `optimizer_state`: live tensors under names that no engine changes.
- `inspect`: what is in a checkpoint, and whether it is complete.
- `files`: what is on disk. `foreign`: stock Lightning's and DeepSpeed's checkpoints, safetensors.
"""
