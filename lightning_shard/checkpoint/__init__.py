"""Portable checkpoints: one on-disk form for every engine, mesh and number of ranks; nothing here imports Lightning.

- `save` writes a directory, whole or not at all, from live tensors (`save_training_state` from a module and its
  optimizers); `load` reads one into live tensors, however they are cut.
- `collect` says what there is to save, `plan` who writes which boxes of it (`overlap` that they do not overlap).
- `background` saves while training goes on, from copies that `staging` makes; `under_way` is what is being written.
- `layout`, `manifest` are what a directory looks like; `commit` puts one in place, replaces and removes it, `locks`
  tells what is being written from what was left behind.
- `state`, `optimizer`, `trainer_state` give what is in it names that no engine changes; `stepped` says what optimizers
  step.
- `optimizer_saved`, `optimizer_load`, `optimizer_fill`: what was saved, how it fits live optimizers, giving it to them.
- `writer`, `reader`, `metadata` are torch.distributed.checkpoint's files, read without trusting them.
- `stored` is a checkpoint whose tensors are read one at a time, `forms` opens one of any form as that, `full`,
  `lightning_file` and `archive` write and read one stock Lightning file, `stock_fsdp` and `stock_deepspeed` read the
  directories of others, `export` writes safetensors, `inspect` tells what is in a checkpoint and whether it is whole.
- `pretrained` fills modules from safetensors files, which `safetensors` reads in slices.
- `fit` compares what is asked for with what is there.
"""
