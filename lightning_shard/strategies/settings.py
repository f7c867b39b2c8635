"""The constructor arguments that all strategies have."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar

from lightning.pytorch import Trainer

from lightning_shard.arguments import Given, checked
from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.engines.units import ClassNames, class_names
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.precision.loss_weight import WeightKey
from lightning_shard.run.nonfinite import Action, NonFinite

AccumulateSync = Literal["auto", "boundary", "micro_batch"]
ResumeHyperparameters = Literal["checkpoint", "configuration"]

C = TypeVar("C", bound=Callable[..., Any])


class CommonArguments(TypedDict, total=False):
    """Arguments that `with_common_arguments` shows instead of ``**common``, for type checkers."""

    aligned: bool
    activation_checkpointing: Literal["units", "selective", "offload"] | int | ClassNames | None
    compile: bool
    accumulate_sync: AccumulateSync
    log_grad_norm: bool
    error_if_nonfinite: bool
    loss_weight_key: str | None
    nonfinite: Given[NonFinite] | Action | None
    timeout_seconds: float
    init_timeout_seconds: float
    lost_rank_seconds: float | None
    stuck_seconds: float | None
    process_group_backend: str | None
    preemption: Given[PreemptionConfig] | None
    async_save: bool | Literal["continuous"]
    save_frozen: bool
    sample_seeds: bool | None
    resume_hyperparameters: ResumeHyperparameters
    hooks_use_accessor: bool
    unshard_after_fit: bool


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Values of the common arguments, and the mesh, which only some strategies take.

    Args:
        aligned: hold the precision contract, whatever the Trainer's precision: fp32 masters that begin as the unrounded
            loaded values, and optimizer state, reduction and accumulation in fp32.
        activation_checkpointing: recompute forward in backward: "units" for every shard unit (DDP and DeepSpeed have
            none: every repeated block), n for every n-th, or a list of classes or their names. "selective" for every
            one but keeps its matrix products, convolutions and attention (without dropout). "offload" for every one,
            with its inputs in pinned host memory until backward comes near.
        compile: compile the forward of every shard unit, or repeated block, with ``torch.compile``. Code that it can't
            compile runs eagerly. Not in ZeRO stage 3, which gathers inside of the blocks.
        accumulate_sync: when gradients are reduced under ``accumulate_grad_batches``: after each "micro_batch" (engines
            that shard keep sharded gradients only), or once at the "boundary" (less communication, full gradients on
            every rank). "auto" is "micro_batch" for FSDP and for DDP under ``aligned``, else "boundary" for DDP. With
            DeepSpeed the stage decides: "boundary" in 1, "micro_batch" in 2 and 3.
        log_grad_norm: log ``grad_norm`` also without ``gradient_clip_val``.
        error_if_nonfinite: raise when clipping finds a norm of inf or NaN, instead of scaling by it.
        loss_weight_key: entry of a batch that weighs its loss in the average over ranks and accumulated micro-batches:
            the entry's sum, "attention_mask" (or "2", of a tuple), or the number of its elements that differ from a
            number, "labels != -100". ``training_step`` may return the weight instead:
            ``{"loss": loss, "weight": n}``, with ``"reduction": "sum"`` if the loss is a sum and no mean.
        nonfinite: action on a loss or gradient of inf or NaN on any rank: "raise", "skip" the step, or "rollback" to
            the newest checkpoint. A mapping sets more. null: none.
        timeout_seconds: how long a collective waits before the run fails.
        init_timeout_seconds: how long a rank may be late at the beginning before the others fail.
        lost_rank_seconds: how long a rank may give no sign of life before the others end with a message that names it.
            null: they wait for ``timeout_seconds``.
        stuck_seconds: how long all ranks may stand still before the run ends, unless it is saving or in a callback. The
            message names the rank that the others wait for, its phase and its line. A warning comes after half of it.
            null: they wait for ``timeout_seconds``.
        process_group_backend: "nccl", "gloo", ... Default: by device. With "cpu:gloo,cuda:nccl" torch's own functions,
            such as ``clip_grad_norm_``, reduce tensors that are offloaded to the host.
        preemption: behaviour of a fit on a signal to stop or near a time limit.
        async_save: let training go on while a checkpoint is written, once this rank's part is copied to the host,
            which takes memory for that one copy. A failed write raises at the next batch. A save that is due while
            another is written waits for it. Under "continuous" it begins after the first step at which the other is
            complete: with ``every_n_train_steps: 1`` each save begins when the last one ends.
        save_frozen: save frozen parameters too, such as the base of adapters. false: save digests of the parameters
            that were frozen when the fit began. A resumed run compares its own with them.
        sample_seeds: seed the random numbers that a training dataset draws for a sample (augmentation) by epoch and
            sample. Then they depend neither on resuming, nor on the number of workers or processes. null: under
            ``aligned``.
        resume_hyperparameters: whose hyperparameters of optimizers and of torch's learning rate schedulers win if they
            differ on resume: the "checkpoint"'s, or the "configuration"'s. A schedule keeps its position either way.
        hooks_use_accessor: say that hooks of the module and of callbacks between backward and the step, and a
            ``training_step`` that steps by hand, read and write gradients with ``full_parameters`` or ``full_tensor``
            alone, or not at all. Under ZeRO ``.grad`` of a parameter is not the reduced gradient: there such hooks are
            refused under ``aligned``, and else warned of.
        unshard_after_fit: make a plain module with full parameters on the host when a fit ends, as
            `lightning_shard.unshard` does. The optimizers of the shards are dropped. Save their state during the fit.
    """

    mesh: MeshConfig
    aligned: bool = False
    activation_checkpointing: Literal["units", "selective", "offload"] | int | ClassNames | None = None
    compile: bool = False
    accumulate_sync: AccumulateSync = "auto"
    log_grad_norm: bool = False
    error_if_nonfinite: bool = False
    loss_weight_key: str | None = None
    nonfinite: Given[NonFinite] | Action | None = None
    timeout_seconds: float = 1800.0
    init_timeout_seconds: float = 300.0
    lost_rank_seconds: float | None = 120.0
    stuck_seconds: float | None = 600.0
    process_group_backend: str | None = None
    preemption: Given[PreemptionConfig] | None = None
    async_save: bool | Literal["continuous"] = False
    save_frozen: bool = True
    sample_seeds: bool | None = None
    resume_hyperparameters: ResumeHyperparameters = "checkpoint"
    hooks_use_accessor: bool = False
    unshard_after_fit: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "preemption", self.preemption or PreemptionConfig())
        if isinstance(self.activation_checkpointing, list):
            object.__setattr__(self, "activation_checkpointing", class_names(self.activation_checkpointing))
        for name in ("timeout_seconds", "init_timeout_seconds", "lost_rank_seconds", "stuck_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigurationError(f"{name} is {seconds}, but must be a number of seconds greater than 0.")
        if isinstance(self.nonfinite, str):
            object.__setattr__(self, "nonfinite", NonFinite(action=self.nonfinite))
        if self.loss_weight_key is not None:
            WeightKey.parse(self.loss_weight_key)

    @property
    def at_boundary(self) -> bool:
        """Whether accumulated gradients are reduced once, at the accumulation boundary."""
        return self.accumulate_sync == "boundary"

    @property
    def forward(self) -> ForwardOptions:
        named: Any = self.activation_checkpointing
        return ForwardOptions(activation_checkpointing=named, compile=self.compile)


def _stock_argument(name: str) -> str:
    from lightning_shard.migrate.lightning_strategies import called_here

    if name in inspect.signature(Trainer).parameters:
        return f" It is the Trainer's: Trainer({name}=..., strategy=...)."
    return called_here(name)


def with_common_arguments(constructor: C) -> C:
    """Show the common arguments in place of ``**common`` in a constructor's signature and docstring, also for YAML."""
    own = inspect.signature(constructor, eval_str=True)
    fields = inspect.signature(CommonSettings, eval_str=True).parameters.values()
    kept = [p for p in own.parameters.values() if p.kind != p.VAR_KEYWORD]
    vars(constructor)["__signature__"] = own.replace(parameters=[*kept, *(p for p in fields if p.name != "mesh")])
    texts = inspect.cleandoc(CommonSettings.__doc__ or "").partition("Args:\n")[2]
    before, raises, after = inspect.cleandoc(constructor.__doc__ or "").partition("\n\nRaises:")
    constructor.__doc__ = f"{before}\n{texts}{raises}{after}"
    whose = constructor.__qualname__.partition(".")[0]
    return checked(whose, foreign=_stock_argument)(constructor)
