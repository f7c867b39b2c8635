"""The `Engine` protocol, between Lightning's hooks and the code that shards and steps a module."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard.engines.memory_breakdown import Resident
from lightning_shard.engines.memory_model import EngineFacts
from lightning_shard.engines.optimizer_probe import Needs
from lightning_shard.engines.units import Unit, find_units
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run before its processes are connected."""

    ranks: int
    per_node: int  # Ranks on one node.
    policy: PrecisionPolicy
    precision: str = "32-true"  # The Trainer's name of the policy, for messages.
    aligned: bool = False  # Whether the precision contract holds.
    device_type: str = "cuda"  # "cpu" or "cuda".
    accumulate_grad_batches: int = 1
    optimizer: Mapping[str, Any] | None = None  # ``type`` and hyperparameters, for DeepSpeed's "auto" values.


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """Settings of the Trainer and its dataloader that an engine may read."""

    micro_batch_size: int | None = None  # Samples of one rank in a micro-batch, or None if the dataloader has no size.
    accumulate_grad_batches: int = 1  # Micro-batches of an optimizer step.
    gradient_clip_val: float | None = None  # None or 0: gradients are not clipped.
    gradient_clip_algorithm: str = "norm"  # "norm" or "value".
    # Optimizer steps of the fit, or None without an end. Collective: it may set up the data.
    total_steps: Callable[[], int | None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose processes are connected."""

    planned: PlannedRun
    device: torch.device  # The device this rank computes on.
    mesh: DeviceMesh  # 2-D, with the axes ``("replicate", "shard")``.
    seed: int  # Rank 0's, for modules on the meta device.
    fitting: bool  # False: the module is only evaluated.
    automatic: bool = True  # Whether the run uses Lightning's automatic optimization.
    # True: a backward pass is the last of its step unless `Engine.sync_gradients` says otherwise. False: only the
    # optimizer's step shows that the backward pass before it was the last.
    foresees_steps: bool = True
    trainer: TrainerFacts = TrainerFacts()

    @property
    def policy(self) -> PrecisionPolicy:
        return self.planned.policy


class Engine(Protocol):
    """Shards, replicates or partitions a module, and steps it. All ranks call each method, in the same order. Methods
    with a body have the default behaviour.
    """

    name: str  # "ddp", "fsdp" or "deepspeed", as in a checkpoint's manifest.
    replicates: bool  # Whether parameters are plain tensors, full on every rank, in a fit.
    gathers_in_forward: bool  # Whether a forward pass of one rank needs a forward pass of all others.
    follows_freezing: bool  # Whether parameters may be frozen and thawed during a fit.
    shows_gradients: bool = True  # Whether parameters have their gradients between backward and the step.
    shares_buffers: bool = True  # Whether each optimizer step begins with rank 0's buffers on all ranks.

    # Before a run

    def check(self, run: PlannedRun) -> None:
        """Raise ConfigurationError for impossible settings, before any process group, file or parameter is touched."""
        return

    def policy(self, base: PrecisionPolicy, *, loss_scale_given: bool) -> PrecisionPolicy:
        """The dtypes of a run, from the precision's. ``loss_scale_given``: the user gave a loss scale."""
        return base

    def units(self, module: nn.Module) -> list[Unit]:
        """The shard units of a module with full parameters. All but the standalone ones are also the units of
        activation checkpointing and of compilation.
        """
        return [unit for unit in find_units(module, "auto") if not unit.standalone]

    def ignored_modules(self) -> Sequence[str]:
        """Class names of modules that are not sharded."""
        return ()

    def memory_model(self, module: nn.Module, run: PlannedRun) -> EngineFacts:
        """The engine as plain numbers, for the plan and the memory account. ``module`` has full parameters, maybe on
        the meta device. ConfigurationError: settings contradict the number of processes or each other.
        """

    def resolved_config(self) -> Mapping[str, Any]:
        """All settings by name, in plain values, which must be the same on every rank."""

    # A run

    def prepare(self, module: nn.Module, run: Run) -> nn.Module:
        """Shard, replicate or partition ``module`` in place, and return the Trainer's model. Raises
        ConfigurationError.
        """

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], Any]:
        """Prepare to step the optimizers of a fit, which were constructed with the prepared module's parameters.
        Returns the fit's optimizers from now on, and the learning rate schedule of the engine's own configuration or
        None. ConfigurationError: the engine can't step an optimizer.
        """

    def replicas(self) -> dist.ProcessGroup | None:
        """The group of ranks that hold the same values, or None if there is none to compare."""

    _needs: Mapping[int, Needs] = {}  # By the ``id`` of each of the fit's optimizers.

    def needs(self, optimizer: Optimizer) -> Needs:
        """The needs of one of the fit's optimizers in its step."""
        return self._needs.get(id(optimizer), Needs())

    upcast: Mapping[str, torch.dtype]  # Loaded dtypes, by FQN, of trainable parameters whose masters have another.

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``step(*args, **kwargs)`` of a training step, with parameters gathered as modules need them."""

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `forward`, for a step without a backward pass."""

    def backward(self, loss: Tensor, call: Callable[[Tensor], None], *, overridden: bool, **kwargs: Any) -> None:
        """Run backward from ``loss``, a scaled scalar, by ``call``, the LightningModule's method with ``kwargs``."""

    def sync_gradients(self, enabled: bool) -> None:
        """Declare whether the next backward passes end an accumulation."""

    def finish_gradients(self) -> None:
        """Reduce, at the accumulation boundary, the gradients that backward did not."""
        return

    def reduction_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which gradients are summed over ranks, read from the objects that reduce them."""

    def step_optimizer(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        """Step ``optimizer``, so that the next forward sees the new values. With ``skip``, after an overflow, only drop
        the gradients. ``kwargs`` are arguments of the optimizer's own step. A ``closure`` among them returns the loss
        of the last backward pass and computes nothing.
        """

    steps_itself: bool  # Whether `step_optimizer` must be called instead of the optimizer's own step, even if skipped.

    def free_gradients(self) -> None:
        """Drop the last step's gradients if they would use memory during the next forward."""

    def follow_freezing(self) -> nn.Module:
        """Follow parameters that were frozen or thawed since the last step, and return the Trainer's model. Raises
        ConfigurationError.
        """

    def reshard_and_sync_masters(self) -> None:
        """Put the stepped tensors into the module in place of parameters that forward left gathered. No
        communication.
        """
        return

    def before_saving(self) -> None:
        """Tell every rank which optimizer state the others have."""

    def begin_writing(self) -> None:
        """Announce writes into live tensors, maybe on some ranks only. `refresh_model_weights` follows them."""
        return

    def refresh_model_weights(self) -> None:
        """Make the next forward see the values that were written into live tensors."""
        return

    def resumed(self) -> None:
        """Update, after optimizer state was loaded, counters that are in no tensor."""
        return

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Plain values about the engine that a checkpoint keeps for people to read."""
        return {}

    def release_module(self, *, failed: bool) -> None:
        """End the run and remove the engine's hooks. No communication if it ``failed``: other ranks may be anywhere."""

    # The run's live tensors on this rank, after `prepare`. No method communicates.

    def masters(self) -> Mapping[str, LiveTensor]:
        """The tensors that checkpoints and users read in place of the module's own, by FQN."""

    def optimizers(self) -> Sequence[AnyOptimizer]:
        """The optimizers of a fit as checkpoints see them: over the module's parameters, or over flat tensors."""

    def stepped_parameters(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]] | None:
        """FQN and tensor of the masters that ``optimizer`` steps. None: it steps the module's own parameters."""

    def gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        """The reduced gradient of a parameter. It exists from the accumulation boundary to the step."""

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], DeviceMesh | None]:
        """This rank's reduced gradients of ``optimizer``, DTensors or plain tensors, which may be scaled in place, and
        the mesh over which plain tensors are disjoint shards.
        """

    def accumulated(self) -> Mapping[str, LiveTensor]:
        """Gradients that wait for further micro-batches, by FQN: reduced shards, or this rank's own full ones."""

    def memory_breakdown(self) -> Iterable[Resident]:
        """All live tensors of the run except activations, by kind and by device, host or file."""

    def unsharded(self) -> Iterable[Resident]:
        """The parameters that are gathered at this moment."""
