"""Forward, backward and the optimizer's step through DeepSpeed's engine, and the gradients between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard.engines.zero import gradients
from lightning_shard.engines.zero import running as zero
from lightning_shard.errors import ConfigurationError
from lightning_shard.strategies.deepspeed_holding import HoldingStrategy
from lightning_shard.tensors.flat import LiveTensor


class SteppingStrategy(HoldingStrategy):
    """Steps with DeepSpeed's engine once a subclass has started it, and as the parent does before."""

    _in_step = False
    """Whether a step of the module is running, in which manual optimization calls backward."""

    def _engine_steps(self) -> dict[str, Any]:
        return {"step": self._engine_step, "backward": self._engine_backward}

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running is None:
            return super()._run(step, *args, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.training and not self.lightning_module.automatic_optimization:
            # Which of the step's backward passes is the last is known when the optimizer steps.
            zero.set_boundary(self._running, False)
        self._in_step = True
        try:
            return zero.run(self._running, step, *args, **kwargs)
        finally:
            self._in_step = False

    def _engine_backward(self, loss: Tensor, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        assert self._running is not None
        if is_overridden("backward", module):
            module.backward(loss, *args, **kwargs)
            self._running.pending = True
        else:
            zero.backward(self._running, loss, inside_forward=self._in_step, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Tell DeepSpeed that this micro-batch is not the last of an accumulation."""
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(True)

    def _set_gradient_sync(self, enabled: bool) -> None:
        if self._running is not None:
            zero.set_boundary(self._running, enabled)

    def _finish_gradients(self) -> None:
        assert self.lightning_module is not None
        if self._running is not None and not self.lightning_module.automatic_optimization:
            with self._watching_collectives():
                zero.finish_accumulation(self._running)

    def _engine_step(self, optimizer: Optimizer) -> None:
        assert self._running is not None
        zero.step(self._running, skip=self.precision_plugin.step_skipped)

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        assert self._running is not None
        if self._stage == 0:
            return super()._gradients(optimizer)
        return gradients.reduced(self._running.zero) if self._running.pending else []

    @property
    def _gradient_pieces(self) -> DeviceMesh | None:
        return None if self._stage == 0 else self.device_mesh

    def _stepped(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]] | None:
        if self._running is None or self._stage == 0:
            return None
        return [
            (member.fqn, group.flat) for group in self._running.groups for member in group.members if member.stepped
        ]

    def _live_gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        if self._running is None or self._stage == 0:
            return super()._live_gradient(fqn, parameter)
        return gradients.of_parameter(self._running.zero, self._running.groups, fqn) if self._running.pending else None

    def _held_gradients(self) -> Iterable[tuple[str, Tensor]]:
        assert self.lightning_module is not None
        if self._running is None or self._stage == 0:
            return super()._held_gradients()
        names: dict[Tensor, str] = {p: n for n, p in self.lightning_module.named_parameters() if p.requires_grad}
        return gradients.held(self._running.zero, names)

    def _follow_freezing(self) -> None:
        raise ConfigurationError(
            "Parameters were frozen or thawed after the fit began, but DeepSpeed steps those that were trainable then. "
            "Freeze before the fit, or use shard_fsdp."
        )
