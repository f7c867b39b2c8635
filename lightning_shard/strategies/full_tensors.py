"""Reading and changing a whole parameter, gradient or optimizer state by name, the same on every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_shard.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_shard.run.full_tensors import FullTensors


def full_tensor(trainer: Trainer, fqn: str, kind: str = "parameter") -> Tensor | None:
    """A copy of a whole tensor, the same on every rank. Collective: all ranks call it.

    Args:
        trainer: in a run with a strategy of this package; optimizer state and gradients are there in a fit alone.
        fqn: the parameter's name in the LightningModule, as in its ``named_parameters()`` before the fit.
        kind: "parameter": what the optimizer steps (the master weights); "gradient": reduced over all ranks, there
            from backward to the step, such as in ``on_before_optimizer_step``; else the optimizer's name of a slot,
            such as "exp_avg".

    Returns:
        The tensor in the dtype that it is held in; None for a gradient or a slot that is not there.

    Raises:
        ConfigurationError: another strategy, or no such parameter, with the nearest names.
    """
    return _tensors(trainer).read(fqn, kind)


def set_full_tensor(trainer: Trainer, fqn: str, value: Tensor, kind: str = "parameter") -> None:
    """Give a whole tensor new values, on every rank and where forward sees them. Collective: all ranks call it.

    Args:
        trainer: as for `full_tensor`.
        fqn: as for `full_tensor`.
        value: equal on all ranks, of the whole tensor's shape; it is cast to the dtype that the tensor is held in.
        kind: as for `full_tensor`.

    Raises:
        ConfigurationError: as for `full_tensor`; a gradient or slot that is not there; another shape.
    """
    _tensors(trainer).write(fqn, value, kind)


def _tensors(trainer: Trainer) -> FullTensors:
    from lightning_shard.run.full_tensors import FullTensors
    from lightning_shard.strategies.strategy import ShardStrategy

    strategy = trainer.strategy
    if not isinstance(strategy, ShardStrategy):
        raise ConfigurationError(
            f"the Trainer's strategy is {type(strategy).__name__}, but full tensors are read from a strategy of "
            "lightning_shard, such as shard_fsdp."
        )
    return FullTensors(trainer.lightning_module, strategy.engine, strategy.checkpoints, device=strategy.root_device)
