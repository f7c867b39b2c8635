"""DeepSpeed's options in typed groups, where None leaves DeepSpeed its default, and the values of a run for "auto"."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from lightning_shard.arguments import checked_fields
from lightning_shard.engines.engine import PlannedRun, Run, TrainerFacts
from lightning_shard.precision.words import DType


@checked_fields("offload_optimizer")
@dataclass(frozen=True, kw_only=True)
class OptimizerOffload:
    """Keeps optimizer state and fp32 masters off the device. The optimizer steps on the host."""

    device: Literal["cpu", "nvme"] = "cpu"
    """"cpu": host memory, stages 1 to 3. "nvme": files, stage 3 only."""

    nvme_path: str | None = None
    """Directory for "nvme", on each node. A run removes its folder in it."""

    pin_memory: bool | None = None
    """Page-locked host memory, for faster copies. None: true on CUDA, false on CPU."""

    buffer_count: int | None = None
    """Buffers for state from NVMe, each as large as a sub-group. DeepSpeed's: 4, and more for more slots."""

    fast_init: bool | None = None
    """Faster set-up of state on NVMe. DeepSpeed's: false."""


@checked_fields("offload_parameters")
@dataclass(frozen=True, kw_only=True)
class ParameterOffload:
    """Keeps a rank's parameter shards off the device, in stage 3 only."""

    device: Literal["cpu", "nvme"] = "cpu"
    """"cpu": host memory. "nvme": files."""

    nvme_path: str | None = None
    """Directory for "nvme", on each node. A run removes its folder in it."""

    pin_memory: bool | None = None
    """Page-locked host memory, for faster copies. None: true on CUDA, false on CPU."""

    buffer_count: int | None = None
    """Buffers for reading parameters from NVMe. DeepSpeed's: 5."""

    buffer_size: int | None = None
    """Elements per buffer. No shard may be larger. DeepSpeed's: 1e8."""

    max_in_cpu: int | None = None
    """Elements that stay in host memory under "nvme". DeepSpeed's: 1e9."""


@checked_fields("buckets")
@dataclass(frozen=True, kw_only=True)
class ZeroBuckets:
    """How gradients and updated parameters are bucketed for the network."""

    reduce: int | Literal["auto"] | None = None
    """Elements of gradients that are reduced at a time. "auto": the square of the model's hidden size. None: 2e8 in
    stages 1 and 2 and 5e8 in stage 3, and no more than the model has."""

    allgather: int | None = None
    """Elements of updated parameters that are gathered at a time, stages 1 and 2. None: 2e8, or the model's."""

    overlap_comm: bool | None = None
    """Reduce while backward runs. None: true but for stage 1 in bf16 without offload, on CPUs in stage 3 alone."""

    contiguous_gradients: bool | None = None
    """Copy gradients into one buffer as they come. DeepSpeed's: true."""

    reduce_scatter: bool | None = None
    """Reduce-scatter gradients in place of an all-reduce. DeepSpeed's: true."""

    round_robin_gradients: bool | None = None
    """Assign parameters to ranks in turn, for faster copies under offload, in stages 1 and 2. DeepSpeed's: false."""


@checked_fields("stage3")
@dataclass(frozen=True, kw_only=True)
class Stage3Options:
    """When stage 3 gathers parameters and when it frees them."""

    prefetch_bucket_size: int | Literal["auto"] | None = None
    """Elements that are gathered ahead of use. "auto": 0.9 times the square of the hidden size. DeepSpeed's: 5e7."""

    param_persistence_threshold: int | Literal["auto"] | None = None
    """Parameters of fewer elements stay gathered on every rank. "auto": 10 times the hidden size. DeepSpeed's: 1e5."""

    model_persistence_threshold: int | None = None
    """Elements that may stay gathered in total. DeepSpeed's: no limit."""

    max_live_parameters: int | None = None
    """Gathered elements that a device holds at a time. DeepSpeed's: 1e9."""

    max_reuse_distance: int | None = None
    """A parameter that is used again within so many elements is not freed. DeepSpeed's: 1e9."""

    sub_group_size: int | None = None
    """Elements that the optimizer steps at a time. DeepSpeed's: 1e9."""

    module_granularity_threshold: int | None = None
    """Modules with fewer elements per submodule are gathered as one. DeepSpeed's: 0, none."""

    leaf_modules: list[str] | None = None
    """Class names of modules whose parameters are gathered together, such as mixture-of-experts blocks. DeepSpeed's:
    those of Mixtral, Qwen2-MoE and Qwen3-MoE in transformers."""


@checked_fields("zero_plus_plus")
@dataclass(frozen=True, kw_only=True)
class ZeroPlusPlus:
    """ZeRO++: less traffic for stage 3, at the cost of memory or of digits."""

    hpz_partition_size: int | None = None
    """hpZ: ranks, usually a node's, that shard a second copy of the parameters, for backward. DeepSpeed's: 1, none."""

    quantized_weights: bool | None = None
    """qwZ: gather parameters in int8. DeepSpeed's: false."""

    quantized_nontrainable_weights: bool | None = None
    """Keep frozen parameters in int8: refused, as DeepSpeed 0.19 loses their values. DeepSpeed's: false."""

    quantized_gradients: bool | None = None
    """qgZ: reduce gradients in int4. DeepSpeed's: false."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFields:
    """The arguments of ``ShardDeepSpeedStrategy``."""

    stage: Literal[0, 1, 2, 3] | None = None
    offload_optimizer: OptimizerOffload | None = None
    offload_parameters: ParameterOffload | None = None
    buckets: ZeroBuckets = field(default_factory=ZeroBuckets)
    stage3: Stage3Options = field(default_factory=Stage3Options)
    zero_plus_plus: ZeroPlusPlus = field(default_factory=ZeroPlusPlus)
    communication_data_type: DType | None = None
    config: str | dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts(PlannedRun):
    """The values that a configuration can take from its run. ``optimizer`` has a ``type`` once an optimizer exists."""

    trainer: TrainerFacts = field(default_factory=TrainerFacts)
    total_steps: int | None = None  # Optimizer steps of the whole fit. None: not known.
    hidden_size: int | None = None  # The largest that the model's configuration names. None: it names none.
    number_of_parameters: int | None = None  # Elements of all parameters, unsharded.


def run_facts(module: nn.Module, run: Run, optimizers: Iterable[Any], *, count_steps: bool = False) -> RunFacts:
    """Collect the facts of a run with its optimizers. All ranks call it. ``count_steps`` sets up the training data."""
    trainer, first = run.trainer, next(iter(optimizers), None)
    known = {} if first is None else {k: first.defaults.get(k) for k in ("lr", "betas", "eps", "weight_decay")}
    # Without foresight only the user's code knows. Above 1 DeepSpeed keeps the memory for sums of offloaded gradients.
    accumulate = trainer.accumulate_grad_batches if run.foresees_steps else max(2, trainer.accumulate_grad_batches)
    return planned_facts(
        module,
        run.planned,
        device_type=run.device.type,
        trainer=trainer,
        accumulate_grad_batches=accumulate,
        optimizer=first and {"type": type(first).__name__, **{k: v for k, v in known.items() if v is not None}},
        total_steps=trainer.total_steps() if count_steps else None,
    )


def planned_facts(module: nn.Module, run: PlannedRun, **others: Any) -> RunFacts:
    """Collect the facts of a planned run. ``others`` replace its fields."""
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
    return RunFacts(**{**vars(run), "hidden_size": hidden_size(module), "number_of_parameters": elements, **others})


def hidden_size(root: nn.Module) -> int | None:
    """Find the largest hidden size in the Hugging Face style ``config`` of any module in ``root``, or None."""
    configs = [getattr(module, "config", None) for module in root.modules()]
    parts = [part for config in configs for part in (config, getattr(config, "text_config", None))]
    found = [getattr(part, "hidden_size", None) for part in parts]
    found += [size for part in parts for size in getattr(part, "hidden_sizes", None) or ()]
    return max((size for size in found if isinstance(size, int)), default=None)
