"""torch's DistributedDataParallel, for fp32. `lightning_shard.engines.replicate` has every precision."""

import re
from collections.abc import Callable, Generator, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lightning_shard.engines import optimizer_remap
from lightning_shard.engines.engine import PlannedRun, Run
from lightning_shard.engines.materialize import Materializer
from lightning_shard.engines.memory_model import TorchDDPFacts
from lightning_shard.engines.module_checks import refuse_sharded
from lightning_shard.engines.replicated import average_gradients, broadcast_from_rank_0
from lightning_shard.engines.torch_optimizer_engine import TorchOptimizerEngine
from lightning_shard.engines.transforms import find_transforms
from lightning_shard.errors import ConfigurationError
from lightning_shard.precision.casting import cast_trainable_parameters
from lightning_shard.private_names import require
from lightning_shard.tensors.names import named_parameters
from lightning_shard.text import listed

require(DistributedDataParallel, "_remove_autograd_hooks")
require(dist.Reducer, "_autograd_hook _check_reducer_finalized _rebuild_buckets")

CommHook = Literal["fp16_compress", "bf16_compress"] | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """Options of torch's DDP, see ``ShardDDPStrategy``."""

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    bucket_cap_mb: float | None = None
    comm_hook: CommHook | None = None
    comm_state: Any = None

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ConfigurationError(f"bucket_cap_mb is {self.bucket_cap_mb}, but must be greater than 0.")

    def changed(self) -> dict[str, Any]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


class TorchDDP(TorchOptimizerEngine):
    """A full replica on every rank. DDP reduces gradients by buckets in backward."""

    name = "ddp"
    replicates = True
    gathers_in_forward = False

    _options: DDPOptions
    _records = False  # Whether the next backward pass is the first one of a static graph.

    def memory_model(self, module: nn.Module, run: PlannedRun) -> TorchDDPFacts:
        views = self._options.gradient_as_bucket_view
        return TorchDDPFacts(ranks=run.ranks, gradient_as_bucket_view=views, reduce_at_boundary=self._at_boundary)

    def prepare(self, module: nn.Module, run: Run) -> nn.Module:
        refuse_sharded(module, "ShardDDPStrategy")
        if run.fitting and self._options.static_graph and not run.automatic:
            raise ConfigurationError("static_graph is true, but manual optimization reduces inside a step. Remove it.")
        self._module, self._run, self.shares_buffers = module, run, self._options.broadcast_buffers
        optimizer_remap.remember_parameters(module)
        transforms = find_transforms(module, self.units(module), self._forward_options)
        # After the run the module is on the CPU, as with Lightning's DDP.
        self._closing.callback(module.cpu)
        prepare_replica(module, device=run.device, seed=run.seed)
        for undo in transforms():
            self._closing.callback(undo)
        self.upcast = cast_trainable_parameters(module, run.policy.master)
        if run.fitting:
            self._wrap()
        return module if self._wrapped is None else self._wrapped

    def _wrap(self) -> None:
        self._records, self._wrapped = self._options.static_graph, None
        # A metric's own network is not trained.
        left_out = {p for m in self._module.modules() if isinstance(m, Metric) for p in m.parameters()}
        named = named_parameters(self._module).items()
        # Manual optimization may freeze some while DDP waits for them.
        self._reduced = [name for name, parameter in named if parameter.requires_grad and parameter not in left_out]
        if self._reduced:
            self._wrapped = wrap_in_ddp(self._module, self._options, left_out)

    def replicas(self) -> dist.ProcessGroup | None:
        # A user's own hook may allow local steps between averages.
        return None if callable(self._options.comm_hook) else super().replicas()

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wrapped = self._wrapped
        if wrapped is None:
            with self._foreign_steps.watch_forward():
                return step(*args, **kwargs)
        enabled, automatic = wrapped.require_backward_grad_sync, self._run.automatic

        def run(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            # In manual optimization backward ran inside, and DDP must not prepare for another one.
            wrapped.require_backward_grad_sync &= automatic
            return output

        try:
            with self._named(), self._foreign_steps.watch_forward():
                (output,) = wrapped(run, *args, **kwargs)
        finally:
            wrapped.require_backward_grad_sync = enabled or not automatic
        return output

    @contextmanager
    def _named(self) -> Generator[None, None, None]:
        """Name the parameters without gradients in DDP's error, which has only their positions."""
        try:
            yield
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            unused = listed(self._reduced[int(index)] for index in found[1].split())
            raise ConfigurationError(
                f"The loss of the last backward pass does not depend on {unused}, and DDP waits for their gradients. "
                "Set find_unused_parameters: true (ShardDDPStrategy(find_unused_parameters=True)), freeze them, or use "
                "shard_fsdp, which needs no option if all ranks leave out the same ones."
            ) from None

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Without DDP's collectives, because ranks may have different numbers of batches.
        return step(*args, **kwargs)

    def backward(self, loss: Tensor, call: Callable[[Tensor], None], *, overridden: bool, **kwargs: Any) -> None:
        if self._wrapped is None:
            call(loss)
            return
        with nullcontext() if self._at_boundary else sums_set_aside(self._module):
            if not self._run.automatic:
                with self._named():
                    prepare_for_backward(self._wrapped, loss)
            call(loss)
            self._records = False
        if not self._options.static_graph:
            with self._named():  # DDP itself checks this only after the optimizer's step.
                self._wrapped.reducer._check_reducer_finalized()

    def sync_gradients(self, enabled: bool) -> None:
        if self._at_boundary and self._wrapped is not None:
            # A static graph is recorded only in a pass with a reduction.
            self._wrapped.require_backward_grad_sync = enabled or self._records

    def reduction_dtypes(self) -> set[torch.dtype]:
        if isinstance(hook := self._options.comm_hook, str):
            return {torch.float16 if hook == "fp16_compress" else torch.bfloat16}
        return {p.dtype for name, p in named_parameters(self._module).items() if name in self._reduced}

    def follow_freezing(self) -> nn.Module:
        # DDP reduces the parameters that were trainable when it was constructed.
        if self._wrapped is not None:
            # Other references may keep the wrapper and its hooks alive.
            self._wrapped._remove_autograd_hooks()
        if self._at_boundary:
            # A parameter that is frozen in the middle of a step is stepped with its earlier micro-batches.
            frozen = [p for p in self._module.parameters() if not p.requires_grad]
            average_gradients(frozen, reduce_dtype=self._run.policy.reduce)
        self._wrap()
        return self._module if self._wrapped is None else self._wrapped


def prepare_replica(root: nn.Module, *, device: torch.device, seed: int) -> None:
    """Move ``root`` to ``device``, materialize it and broadcast rank 0's values. All ranks call it."""
    materializer = Materializer(root, device=device, seed=seed)
    materializer.fill(materializer.fqns)
    root.to(device)
    fresh = materializer.created()
    broadcast_from_rank_0(t for t in [*root.parameters(), *root.buffers()] if id(t) not in fresh)


def wrap_in_ddp(root: nn.Module, options: DDPOptions, left_out: Set[Tensor]) -> DistributedDataParallel:
    """Make torch's DDP of any step of ``root`` after `prepare_replica`, without the parameters ``left_out``. All ranks
    call it.
    """
    ignored = [p for p in root.parameters() if p in left_out and p.requires_grad]
    for parameter in ignored:  # DDP reads ``requires_grad`` when it is constructed.
        parameter.requires_grad_(False)
    wrapped = DistributedDataParallel(
        StepRoot(root),  # without `device_ids`, to which DDP would move the whole batch
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        # `SharedBuffers` broadcasts buffers on every engine.
        forward_sync_buffers=False,
        bucket_cap_mb=options.bucket_cap_mb,
        # `prepare_replica` made the ranks equal.
        init_sync=False,
    )
    build_final_buckets(wrapped)
    for parameter in ignored:
        parameter.requires_grad_(True)
    if options.comm_hook is not None:
        hook = options.comm_hook
        if isinstance(hook, str):
            hook = getattr(default_hooks, f"{hook}_hook")
        assert callable(hook)
        wrapped.register_comm_hook(options.comm_state, hook)
    return wrapped


_LOOK_UPS = (nn.Embedding, nn.EmbeddingBag)


def build_final_buckets(wrapped: DistributedDataParallel) -> None:
    """Reduce zeros once, so that the first step has the buckets of all later ones. All ranks call it. DDP rebuilds its
    buckets after the first backward pass, so with 3 ranks or more a resumed run would sum its first step in another
    order. No parameter's autograd node runs, and no hook sees the zeros. Not for a static graph, which has to record a
    real pass.
    """
    # In DDP's order: the reducer identifies parameters by index.
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    sparse = any(getattr(module, "sparse", False) for module in wrapped.modules() if isinstance(module, _LOOK_UPS))
    if wrapped.find_unused_parameters or wrapped.static_graph or sparse:
        return
    reducer: Any = wrapped.reducer

    def ready(_: Tensor) -> None:
        for index in reversed(range(len(parameters))):
            reducer._autograd_hook(index)

    with sums_set_aside(wrapped):  # if parameters were frozen or thawed in the middle of a step
        reducer.prepare_for_backward([])
        trigger = torch.zeros((), requires_grad=True)
        trigger.register_hook(ready)
        trigger.backward()
        for parameter in parameters:
            parameter.grad = None
    reducer._rebuild_buckets()


def prepare_for_backward(wrapped: DistributedDataParallel, loss: Tensor) -> None:
    """Prepare the reducer for a backward pass from ``loss`` before DDP's ``_post_forward`` does."""
    wrapped.require_forward_param_sync = torch.is_grad_enabled() and wrapped.require_backward_grad_sync
    if wrapped.require_forward_param_sync:
        unused = wrapped.find_unused_parameters and not wrapped.static_graph
        # Without it torch's assertion fails in the first pass without unused parameters.
        wrapped.reducer._rebuild_buckets()
        wrapped.reducer.prepare_for_backward([loss] if unused else [])


class StepRoot(nn.Module):
    """The module for DDP and DeepSpeed, whose forward is any step of ``module``, its only child."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any]:
        """Return ``step(*args, **kwargs)`` in a tuple, because engines look for tensors in containers."""
        return (step(*args, **kwargs),)


@contextmanager
def sums_set_aside(module: nn.Module) -> Generator[None, None, None]:
    """Make DDP reduce only the gradients of the backward pass in this context, and add earlier micro-batches' gradients
    afterwards, as sharding engines do. DDP itself would reduce their sum, which rounds differently.
    """
    sums: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in module.parameters():
        if parameter.grad is not None:
            # With gradient_as_bucket_view the gradient is in DDP's bucket, which the pass overwrites.
            sums.append((parameter, parameter.grad.detach().clone()))
            parameter.grad = None
    yield
    with torch.no_grad():  # not `detach`, which does not work in place on sparse gradients
        for parameter, total in sums:
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
