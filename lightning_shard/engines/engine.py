"""What a strategy asks of its engine: the interface between Lightning's hooks and what shards and steps.

A strategy makes an engine from its settings (`Engine.check`, `policy`, `memory_model` and `resolved_config` need no
more), lets it prepare the module of a run, attaches the optimizers of a fit, and takes the module back. Nothing from
here on knows Lightning.
"""

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
    """What is known of a run before it begins."""

    ranks: int  # Processes.
    per_node: int  # Processes of a node.
    policy: PrecisionPolicy  # The dtypes of the run.
    precision: str = "32-true"  # The Trainer's word for them, for messages.
    aligned: bool = False  # Whether the precision contract holds.
    device_type: str = "cuda"  # "cpu" or "cuda".
    accumulate_grad_batches: int = 1
    optimizer: Mapping[str, Any] | None = None  # ``type`` and hyperparameters, for DeepSpeed's "auto" values.


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """What the Trainer and its data say of a run, as far as an engine may ask."""

    micro_batch_size: int | None = None  # Samples of one rank in a micro-batch, where the dataloader says it.
    accumulate_grad_batches: int = 1  # Micro-batches of an optimizer step.
    gradient_clip_val: float | None = None  # None or 0: gradients are not clipped.
    gradient_clip_algorithm: str = "norm"  # "norm" or "value".
    # Optimizer steps of the whole fit, None without an end. All ranks call it: it may set up the data.
    total_steps: Callable[[], int | None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose processes are connected."""

    planned: PlannedRun
    device: torch.device  # Where this rank computes.
    mesh: DeviceMesh  # 2-D, with the axes ``("replicate", "shard")``.
    seed: int  # Rank 0's, for modules on the meta device.
    fitting: bool  # Whether optimizers will step, or the module is evaluated only.
    # Whether Lightning runs backward and the step after a training step, or the step does so itself.
    automatic: bool = True
    # Whether a backward pass that nothing marks is the last one of its step; else the step says that it was.
    foresees_steps: bool = True
    trainer: TrainerFacts = TrainerFacts()

    @property
    def policy(self) -> PrecisionPolicy:
        return self.planned.policy


class EngineTensors(Protocol):
    """The live tensors of a run on this rank, by FQN. No method communicates."""

    def masters(self) -> Mapping[str, LiveTensor]:
        """FQN to what checkpoints have and users read instead of the module's own tensor."""

    def optimizers(self) -> Sequence[AnyOptimizer]:
        """The optimizers of a fit as checkpoints see them: over the module's parameters, or over flat tensors."""

    def stepped_parameters(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]] | None:
        """FQN and tensor of the masters that ``optimizer`` steps; None: it steps the module's own parameters."""

    def gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        """The reduced gradient of a parameter, there from the accumulation boundary to the step."""

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """This rank's reduced gradients of ``optimizer``: DTensors or plain tensors, to be scaled in place."""

    def accumulated(self) -> Mapping[str, LiveTensor]:
        """FQN to gradient, of those that wait for further micro-batches: reduced shards, or this rank's own in full."""

    def memory_breakdown(self) -> Iterable[Resident]:
        """All live tensors of the run but activations, by kind and by device, host or file."""

    def unsharded(self) -> Iterable[Resident]:
        """Of these the parameters that are gathered at this moment."""


class Engine(Protocol):
    """Shards, replicates or partitions a module, and steps it. All ranks call each method, in the same order. What a
    method returns or does here holds where an engine has nothing else to do.
    """

    name: str  # "ddp", "fsdp" or "deepspeed": what a checkpoint's manifest calls the engine.
    replicates: bool  # Whether parameters are plain tensors, full on every rank, in a fit.
    gathers_in_forward: bool  # Whether a forward pass of one rank needs a forward pass of all others.
    follows_freezing: bool  # Whether what is trainable may change during a fit.
    shows_gradients: bool = True  # Whether parameters have their gradients between backward and the step.
    shares_buffers: bool = True  # Whether all ranks compute with rank 0's buffers, as of an optimizer step's beginning.

    # Before a run

    def check(self, run: PlannedRun) -> None:
        """Refuse what can't work (ConfigurationError) before any process group, file or parameter is touched."""
        return

    def policy(self, base: PrecisionPolicy, *, loss_scale_given: bool) -> PrecisionPolicy:
        """The dtypes of a run, from those of the precision; ``loss_scale_given``: whether the user gave one."""
        return base

    def units(self, module: nn.Module) -> list[Unit]:
        """The shard units of a module with full parameters; but for those apart they are also what is checkpointed and
        compiled.
        """
        return [unit for unit in find_units(module, "auto") if not unit.apart]

    def ignored_modules(self) -> Sequence[str]:
        """Class names of modules that are not sharded."""
        return ()

    def memory_model(self, module: nn.Module, run: PlannedRun) -> EngineFacts:
        """The engine as plain numbers, for the plan and the memory account; ``module`` is full, real or without data.
        ConfigurationError: settings that do not fit the number of processes, or each other.
        """

    def resolved_config(self) -> Mapping[str, Any]:
        """All settings by name, in plain values: what must be the same on every rank."""

    # A run

    def prepare(self, module: nn.Module, run: Run) -> nn.Module:
        """Shard, replicate or partition ``module`` in place, or ConfigurationError; returns the Trainer's model."""

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], Any]:
        """Take the optimizers of a fit, made on the prepared module's parameters, and the stepping where it is its own.
        Returns those that the fit goes on with, and the learning rate schedule of the engine's own configuration, to be
        stepped with the optimizer, or None. ConfigurationError: optimizers that the engine can't step.
        """

    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks with the same values, or None. ConfigurationError: gradients were not reduced over them."""

    _needs: Mapping[int, Needs] = {}  # By the ``id`` of each of the fit's optimizers.

    def needs(self, optimizer: Optimizer) -> Needs:
        """What the step of one of the fit's optimizers needs."""
        return self._needs.get(id(optimizer), Needs())

    upcast: Mapping[str, torch.dtype]  # FQN to loaded dtype of the trainable parameters whose masters have another.

    @property
    def tensors(self) -> EngineTensors:
        """The live tensors of the run, from `prepare` on."""

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``step(*args, **kwargs)`` of a training step, with the module's parameters as its modules need them."""

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `forward`, of a step after which no backward follows."""

    def backward(self, loss: Tensor, call: Callable[[Tensor], None], *, overridden: bool, **kwargs: Any) -> None:
        """Run backward from ``loss``, a scalar that is scaled; ``call`` is the LightningModule's, with ``kwargs``."""

    def sync_gradients(self, enabled: bool) -> None:
        """Say whether the backward passes to come end an accumulation."""

    def finish_gradients(self) -> None:
        """At the accumulation boundary: reduce what backward did not."""
        return

    def reduction_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which gradients are summed over ranks, read from what reduces them."""

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], DeviceMesh | None]:
        """`EngineTensors.gradients`, and the mesh over which plain ones are disjoint shards. No communication."""
        return self.tensors.gradients(optimizer), None

    def step_optimizer(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        """Step, or drop the gradients of a step that is skipped after an overflow; forward sees the new values.
        ``kwargs`` are of the optimizer's step; a ``closure`` among them gives the loss, and computes none.
        """

    steps_itself: bool  # Whether `step_optimizer` must be called instead of the optimizer's own, for skipped steps too.

    def free_gradients(self) -> None:
        """Drop the last step's gradients, where they would lie beside the activations of the next forward."""

    def follow_freezing(self) -> nn.Module:
        """Follow what was frozen and thawed since the last step, or ConfigurationError; returns the Trainer's model."""

    def reshard_and_sync_masters(self) -> None:
        """Put what is stepped into the module, where forward left gathered parameters; no communication."""
        return

    def before_saving(self) -> None:
        """Let every rank know which optimizer state there is on others."""

    def begin_writing(self) -> None:
        """Values are about to be written into `tensors`, of which a rank may have no part; the next call is
        `refresh_model_weights`.
        """
        return

    def refresh_model_weights(self) -> None:
        """Let the next forward see what was written into `tensors`."""
        return

    def resumed(self) -> None:
        """Optimizer state was loaded: follow it with what is in no tensor."""
        return

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of the engine for people to read, in plain values."""
        return {}

    def release_module(self, *, failed: bool) -> None:
        """Give the module back; after a failure without communication, because other ranks may be anywhere."""
