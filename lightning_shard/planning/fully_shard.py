"""Bytes of a rank under DDP and FSDP2 at the points of a step, without activations.

Sources: torch's ``distributed/fsdp/_fully_shard/_fsdp_param.py`` (a shard is padded to the first rank's),
``_fsdp_param_group.py`` and ``_fsdp_collectives.py`` (which buffers live how long), and ``nn/parallel/distributed.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import torch

from lightning_shard.engines.facts import FSDPFacts, ReplicateFacts, TorchDDPFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts, ParameterFacts
from lightning_shard.planning.step_memory import Moments, optimizer_bytes
from lightning_shard.precision.policy import PrecisionPolicy


def as_shards(engine: ReplicateFacts | FSDPFacts) -> FSDPFacts:
    """An engine on FSDP2's machinery, seen as shards.

    ``replicate`` is FSDP2 in one piece, which stays gathered from forward to backward: a copy in the compute dtype,
    even where that is the parameters' own (``FSDPParamGroup.wait_for_unshard``).
    """
    if isinstance(engine, FSDPFacts):
        return engine
    return FSDPFacts(
        replicate=engine.ranks, shard=1, reshard_after_forward=False, reduce_at_boundary=engine.reduce_at_boundary
    )


def shard_elements(shape: Sequence[int], pieces: int) -> int:
    """Elements of one of the ``pieces`` that FSDP2 cuts a tensor into along its first dimension, padding included."""
    return -(-shape[0] // pieces) * prod(shape[1:])


def gathered_bytes(parameters: Iterable[ParameterFacts], pieces: int, compute: torch.dtype) -> int:
    """Bytes of a unit that FSDP2 gathers, each parameter padded to a multiple of the pieces, as forward sees it."""
    cut = [p for p in parameters if not p.whole]
    return sum(pieces * shard_elements(p.shape, pieces) * p.seen_in(compute).itemsize for p in cut)


def reduced_bytes(parameters: Iterable[ParameterFacts], pieces: int, dtype: torch.dtype) -> int:
    """Bytes of the buffer that a unit's gradients are reduced from."""
    return sum(pieces * shard_elements(p.shape, pieces) * dtype.itemsize for p in parameters if _reduced(p))


def _reduced(parameter: ParameterFacts) -> bool:
    return parameter.trainable and parameter.dtype.is_floating_point and not parameter.whole


def replica_moments(
    model: ModelFacts,
    engine: TorchDDPFacts | ReplicateFacts,
    policy: PrecisionPolicy,
    optimizer: OptimizerFacts,
    *,
    micro_batches: int,
) -> Moments:
    """Every rank holds everything."""
    trainable = model.trainable
    gradients = sum(p.numel * policy.master.itemsize for p in trainable)
    resting = KindBytes(
        parameters=sum(p.numel * p.stepped_in(policy.master).itemsize for p in model.parameters),
        optimizer=optimizer_bytes(((p.numel, policy.master) for p in trainable), optimizer),
        buffers=model.buffer_bytes,
    )
    if isinstance(engine, ReplicateFacts):
        return _around(resting, gradients, model, as_shards(engine), policy, micro_batches)
    # DDP makes its buckets when it is built, and copies gradients in and out of them unless they lie there.
    resting = replace(resting, communication=0 if engine.gradient_as_bucket_view else gradients)
    waiting = gradients if micro_batches > 1 else 0
    # Reduced after each micro-batch, the sums of those before wait beside DDP's own gradients.
    aside = 0 if engine.reduce_at_boundary else waiting
    return Moments(
        # The strategy drops the last step's gradients ahead of forward, which frees what is not in a bucket.
        forward=MemoryAccount(
            device=replace(resting, gradients=gradients if engine.gradient_as_bucket_view else waiting)
        ),
        backward=MemoryAccount(device=replace(resting, gradients=gradients + aside)),
        step=MemoryAccount(device=replace(resting, gradients=gradients)),
        waiting=waiting,
    )


def shard_moments(
    model: ModelFacts, engine: FSDPFacts, policy: PrecisionPolicy, optimizer: OptimizerFacts, *, micro_batches: int
) -> Moments:
    """Parameters, gradients and optimizer state are cut, each along its first dimension."""
    master = policy.master

    def kept(p: ParameterFacts) -> int:
        return p.numel if p.whole else shard_elements(p.shape, engine.shard)

    resting = KindBytes(
        parameters=sum(kept(p) * p.stepped_in(master).itemsize for p in model.parameters),
        optimizer=optimizer_bytes(((kept(p), master) for p in model.trainable), optimizer),
        buffers=model.buffer_bytes,
    )
    gradients = sum(kept(p) * master.itemsize for p in model.trainable)
    moments = _around(resting, gradients, model, engine, policy, micro_batches)
    return _offloaded(moments, model, engine, master) if engine.cpu_offload else moments


def _around(
    resting: KindBytes,
    gradients: int,
    model: ModelFacts,
    engine: FSDPFacts,
    policy: PrecisionPolicy,
    micro_batches: int,
) -> Moments:
    """The points of a step on FSDP2's machinery, around what rests between steps.

    In forward a unit's all-gather buffer outlives the copies out of it until the next unit's; in backward one unit is
    gathered ahead, and the buffer that gradients are reduced from outlives the reduction until the next unit's.
    """
    size, names = engine.shard, [name for name in model.units if name]
    units, root = [model.units[name] for name in names], model.units[""]
    whole = [gathered_bytes(members, size, policy.compute) for members in units]
    root_whole = gathered_bytes(root, size, policy.compute)
    stays = engine.reshard_after_forward is False
    if stays:
        gathered = sum(whole)
    else:
        part = 0 if engine.reshard_after_forward is True else sum(whole) // int(engine.reshard_after_forward)
        gathered = max(whole, default=0) + part
    in_flight = [max(_neighbours(whole, 2), root_whole), _neighbours(whole, max(1, engine.backward_prefetch))]
    if size == 1:
        in_flight = [0, 0]
    elif stays:
        in_flight[1] = 0
    reduced = max(reduced_bytes(members, size, policy.reduce) for members in [root, *units])
    raw = max(raw_bytes(members, policy.compute) for members in [root, *units])
    waiting = 0
    if micro_batches > 1:
        waiting = raw_bytes(model.parameters, policy.reduce) if engine.reduce_at_boundary else gradients
    kinds = replace(resting, gathered=root_whole + gathered)
    return Moments(
        # The strategy drops the last step's gradients ahead of forward.
        forward=MemoryAccount(device=replace(kinds, gradients=waiting, communication=in_flight[0])),
        backward=MemoryAccount(
            device=replace(kinds, gradients=max(gradients, waiting) + raw, communication=in_flight[1] + reduced)
        ),
        step=MemoryAccount(device=replace(resting, gradients=gradients)),
        waiting=waiting,
    )


def _neighbours(values: Sequence[int], count: int) -> int:
    """The largest sum of ``count`` neighbours."""
    return max((sum(values[i : i + count]) for i in range(max(1, len(values) - count + 1))), default=0)


def raw_bytes(parameters: Iterable[ParameterFacts], dtype: torch.dtype) -> int:
    """Gradients as backward makes them: whole."""
    return sum(p.numel * dtype.itemsize for p in parameters if _reduced(p))


def _offloaded(moments: Moments, model: ModelFacts, engine: FSDPFacts, master: torch.dtype) -> Moments:
    """What is kept lies on the host, but for parameters that FSDP leaves alone and gradients that are whole."""
    alone = [p for p in model.parameters if p.whole]
    stays = sum(p.numel * p.stepped_in(master).itemsize for p in alone)
    kept, waiting = moments.step.device.gradients, moments.waiting
    whole = waiting if engine.reduce_at_boundary else 0

    def moved(account: MemoryAccount, on_device: int, on_host: int) -> MemoryAccount:
        device = account.device
        return MemoryAccount(
            device=replace(device, parameters=stays, optimizer=0, gradients=on_device),
            host=KindBytes(parameters=device.parameters - stays, optimizer=device.optimizer, gradients=on_host),
        )

    return Moments(
        forward=moved(moments.forward, whole, waiting - whole),
        backward=moved(moments.backward, moments.backward.device.gradients - max(kept, waiting) + whole, kept),
        step=moved(moments.step, 0, kept),
        waiting=waiting,
    )
