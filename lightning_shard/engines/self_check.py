"""Compare an engine's numbers with a plain loop, for versions of libraries that this package was not tested with.

The module covers known changes of rounding: an fp32 activation with a 16-bit parameter, a parameter that is used twice,
two micro-batches, and a parameter that one of them does not use. All operators are elementwise, so that kernels round
the same for every memory layout.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from lightning_shard.engines.engine import Engine, Run, TrainerFacts
from lightning_shard.precision.policy import policy_from
from lightning_shard.tensors.full import gather_full
from lightning_shard.tensors.names import fqns

_WIDTH, _STEPS, _MICRO_BATCHES, _RATE = 24, 2, 2, 0.125
# fp32 sums in another order differ by some roundings of 6e-8. A rounding to bf16 in another place changed masters by
# 2e-4. fp32 sums of bf16 values over up to two ranks are exact in any order.
_ORDER_OF_SUMS = 1e-6


class _Unit(nn.Module):
    """A shard unit, in a list so that engines find it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.scale, self.shift, self.rare = (nn.Parameter(_values(3 * index + i) / 4 + 1) for i in range(3))

    def forward(self, x: Tensor, last: bool) -> Tensor:
        x = x.float() * self.shift + self.shift
        x = x.to(self.scale.dtype) * self.scale
        return x * self.rare if last else x


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Unit(index) for index in range(2))

    def forward(self, x: Tensor, last: bool) -> Tensor:
        for unit in self.units:
            x = unit(x, last)
        return x


def _values(seed: float, rows: int = 1) -> Tensor:
    """Values between -1 and 1 that use all bits, without random numbers."""
    return torch.sin(torch.arange(rows * _WIDTH) * 0.7 + seed).view(rows, _WIDTH).squeeze(0)


def _batch(step: int, micro_batch: int, rank: int) -> tuple[Tensor, bool]:
    """Two rows, whose sum has only one order, and whether the micro-batch is the last of its step, which uses ``rare``.
    All even ranks have the same data, and so have all odd ranks.
    """
    seed = 10 + _MICRO_BATCHES * step + micro_batch + 0.5 * (rank % 2)
    return _values(seed, rows=2), micro_batch == _MICRO_BATCHES - 1


def _loss(output: Tensor) -> Tensor:
    return output.float().square().mean() / _MICRO_BATCHES


def _plain_loop(compute: torch.dtype, device: torch.device, ranks: int) -> dict[str, Tensor]:
    """The fp32 masters, by FQN, after a loop with ``parameter.to(compute)`` over all ranks' data in one process."""
    net = _Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=_RATE)
    of_kind = {0: (ranks + 1) // 2, 1: ranks // 2}
    for step in range(_STEPS):
        means = {parameter: torch.zeros_like(parameter) for parameter in net.parameters()}
        for micro_batch, rank in product(range(_MICRO_BATCHES), (kind for kind, count in of_kind.items() if count)):
            x, last = _batch(step, micro_batch, rank)
            seen = {name: parameter.to(compute) for name, parameter in net.named_parameters()}
            _loss(functional_call(net, seen, (x.to(device, compute), last))).backward()
            for parameter in net.parameters():
                if parameter.grad is not None:
                    means[parameter] += parameter.grad * (of_kind[rank] / ranks)
                    parameter.grad = None
        for parameter in net.parameters():
            parameter.grad = means[parameter]
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def _through_engine(engine: Engine, run: Run) -> Mapping[str, Tensor]:
    """The full masters after the same steps by ``engine``, on every rank."""
    net = _Net()
    try:
        engine.prepare(net, run)
        (optimizer,), _ = engine.attach_optimizers([torch.optim.SGD(net.parameters(), lr=_RATE)])
        for step in range(_STEPS):
            for micro_batch in range(_MICRO_BATCHES):
                x, last = _batch(step, micro_batch, dist.get_rank())
                engine.sync_gradients(last)
                loss = engine.forward(lambda x, last: _loss(net(x, last)), x.to(run.device), last)
                engine.backward(loss, lambda loss: loss.backward(), overridden=False)
            engine.finish_gradients()
            engine.step_optimizer(optimizer, skip=False)
            optimizer.zero_grad()
        engine.reshard_and_sync_masters()
        masters = engine.masters()
        return {
            fqn: gather_full(masters.get(fqn, tensor), device=run.device) for fqn, tensor in fqns(net).tensors.items()
        }
    finally:
        engine.release_module(failed=False)


def numeric_difference(engine: Engine, run: Run) -> str:
    """Compare steps of ``engine``, a new one without options for a user's module, with a plain loop.

    All ranks call it. It takes less than a second. ``run`` is a fit of the engine. Returns the parameter with the
    largest difference, relative to its largest element, or "" if all are equal.
    """
    word = "32-true" if run.policy.compute == torch.float32 else "bf16-mixed"
    planned = replace(run.planned, precision=word, aligned=True, accumulate_grad_batches=_MICRO_BATCHES)
    policy = engine.policy(policy_from(word, aligned=True), loss_scale_given=False)
    facts = TrainerFacts(micro_batch_size=2, accumulate_grad_batches=_MICRO_BATCHES, total_steps=lambda: _STEPS)
    own = replace(run, planned=replace(planned, policy=policy), trainer=facts, automatic=True, foresees_steps=True)
    found, expected = _through_engine(engine, own), _plain_loop(policy.compute, run.device, run.planned.ranks)
    off = {
        name: float((found[name] - value).abs().max() / value.abs().max())
        for name, value in expected.items()
        if not torch.equal(found[name], value)
    }
    few = 1 if policy.compute == torch.float32 else 2
    limit = 0.0 if run.planned.ranks <= few else _ORDER_OF_SUMS
    worst = max(off, key=lambda name: off[name], default="")
    return f"{worst} by {off[worst]:.1e}" if worst and not off[worst] <= limit else ""
