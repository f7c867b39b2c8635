"""The part of DeepSpeedCPUAdam's state that is in no tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lightning_shard.tensors.flat import FlatGroup


def replay(optimizer: Optimizer, groups: Sequence[FlatGroup]) -> None:
    """Let the compiled part of a DeepSpeedCPUAdam count to the step that was loaded; nothing for other optimizers.

    It multiplies the powers of the betas up from step to step (``csrc/includes/cpu_adam.h``, ``IncrementStep``), and
    takes ``pow`` where a step does not follow on the one before, which rounds otherwise: a resumed run would not be
    bitwise the one that never stopped. The steps are made again here, over no elements.
    """
    kernel = getattr(optimizer, "ds_opt_adam", None)
    stepped = [group for group in groups if optimizer.state.get(group.flat)]
    if kernel is None or not stepped:
        return
    number, first = optimizer.opt_id, optimizer.defaults  # type: ignore[attr-defined]
    kernel.destroy_adam(number)
    adamw = optimizer.adam_w_mode  # type: ignore[attr-defined]
    kernel.create_adam(number, first["lr"], *first["betas"], first["eps"], first["weight_decay"], adamw, False)
    last = [int(optimizer.state[group.flat]["step"]) for group in stepped]
    nothing = [torch.empty(0)] * 4
    for step in range(1, max(last) + 1):
        for group, end in zip(stepped, last, strict=True):
            if step <= end:
                settings = group.group
                kernel.adam_update(
                    number,
                    step,
                    settings["lr"],
                    *settings["betas"],
                    settings["eps"],
                    settings["weight_decay"],
                    settings["bias_correction"],
                    *nothing,
                )
