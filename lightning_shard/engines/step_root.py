"""The module that DDP and DeepSpeed are given: its forward is any step of the LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class StepRoot(nn.Module):
    """Runs any step of a module, and is no module that a user calls.

    So a call of the user's module inside a step is a submodule's forward, with hooks of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        """Hold ``module`` as the only child."""
        super().__init__()
        self.module = module

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any]:
        """``step(*args, **kwargs)`` in a tuple, in which an engine finds the tensors of any output."""
        return (step(*args, **kwargs),)
