"""torch's DistributedDataParallel over a module: plain functions. It serves fp32; see ``engines/_fsdp2.py``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lightning_shard.engines.materialize import Created, find_initializers, materialize
from lightning_shard.engines.replicated import broadcast_from_rank_0

# torch 2.13 renamed it; the old name also meant the start, which `prepare_whole` sees to.
_FORWARD_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

CommHook = Literal["fp16_compress", "bf16_compress"] | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """What a user sets about torch's DDP; see ``ShardDDPStrategy``."""

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    bucket_cap_mb: float | None = None
    comm_hook: CommHook | None = None
    comm_state: Any = None


def prepare_whole(root: nn.Module, *, device: torch.device, seed: int) -> None:
    """Give every tensor of ``root`` its value and move it to ``device``; rank 0's values win. All ranks call it."""
    initializers = find_initializers(root)
    fqns = {module: fqn for fqn, module in root.named_modules()}
    created: Created = {}
    materialize(fqns, device=device, seed=seed, fqns=fqns, initializers=initializers, created=created)
    root.to(device)
    fresh = {id(made()) for _, made in created.values()}
    broadcast_from_rank_0(t for t in [*root.parameters(), *root.buffers()] if id(t) not in fresh)


def replicate(root: nn.Module, *, device: torch.device, options: DDPOptions) -> DistributedDataParallel:
    """Wrap ``root``, which `prepare_whole` prepared, in torch's DDP. All ranks call it."""
    metrics = {p for m in root.modules() if isinstance(m, Metric) for p in m.parameters()}
    # DDP has no public way to leave parameters out; this attribute is what it documents in its source.
    root._ddp_params_and_buffers_to_ignore = [n for n, p in root.named_parameters() if p in metrics]  # type: ignore[assignment]
    wrapped = DistributedDataParallel(
        root,
        device_ids=None if device.type == "cpu" else [device.index],
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        **{_FORWARD_BUFFERS: options.broadcast_buffers},  # type: ignore[arg-type]
        bucket_cap_mb=options.bucket_cap_mb,
        # `prepare_whole` made the ranks equal.
        init_sync=False,
    )
    if options.comm_hook is not None:
        hook = options.comm_hook
        if isinstance(hook, str):
            hook = getattr(default_hooks, f"{hook}_hook")
        assert callable(hook)
        wrapped.register_comm_hook(options.comm_state, hook)
    return wrapped


def unwrap(wrapped: DistributedDataParallel) -> None:
    """Let go of the module: the parameters' hooks outlive the wrapper as long as anything refers to it."""
    wrapped._remove_autograd_hooks()


class SetAsideGradients:
    """Lets DDP reduce each micro-batch's gradients alone.

    DDP all-reduces ``parameter.grad`` as it is, earlier micro-batches' sums included, which rounds differently from
    adding up reduced gradients as engines do that keep sharded ones.
    """

    def __init__(self, module: nn.Module) -> None:
        """Remember whose gradients are meant."""
        self._module = module
        self._sums: list[tuple[nn.Parameter, Tensor]] = []

    def put_aside(self) -> None:
        """Before a backward pass: take the sums of the micro-batches so far out of DDP's sight."""
        self._sums = []
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                # With gradient_as_bucket_view the gradient lies in DDP's own memory, which the pass overwrites.
                self._sums.append((parameter, parameter.grad.detach().clone()))
                parameter.grad = None

    @torch.no_grad()
    def add_back(self) -> None:
        """After the backward pass: add the sums to the reduced gradients of this micro-batch."""
        for parameter, total in self._sums:
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad.add_(total)
        self._sums = []


def needs_composable(root: nn.Module) -> bool:
    """Whether a parameter that keeps its dtype must be seen in fp32, which torch's DDP does not do."""
    return any(p.is_floating_point() and not p.requires_grad and p.dtype != torch.float32 for p in root.parameters())


def differing_defaults(options: DDPOptions) -> dict[str, Any]:
    """The options that differ from their defaults, by name."""
    defaults = DDPOptions()
    return {n: getattr(options, n) for n in options.__dataclass_fields__ if getattr(options, n) != getattr(defaults, n)}
