"""Modules that keep state of their own, and hooks of users: every engine has the numbers of DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_shard import ConfigurationError, full_tensor
from lightning_shard.engines.replicated import SharedBuffers
from lightning_shard.registry import build
from tests import stand_in
from tests.harness import run_distributed
from tests.models import quiet_trainer

WIDTH = 6
NAMES = ["shard_fsdp", *(f"shard_deepspeed_stage_{stage}" for stage in (1, 2, 3))]


class Net(pl.LightningModule):
    """Learns to shift its input; a subclass changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.build()

    def build(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return functional.mse_loss(self(x).float(), x.roll(1, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self) -> None:
        self.found = {name: full_tensor(self.trainer, name) for name, _ in self.named_parameters()}


class Codebook(Net):
    """Rounds to codes that are averages of what each rank saw, as VQ-VAE's are; the buffer is made anew each time."""

    def build(self) -> None:
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            nearest = functional.one_hot(torch.cdist(hidden.float(), self.codes).argmin(1), 5).float()
            self.codes = 0.5 * self.codes + 0.5 * nearest.T @ hidden.float()
            code = nearest @ self.codes
        return self.last(hidden + (code - hidden).detach())


class FrozenEveryOtherStep(Net):
    """BatchNorm that computes with its running statistics in every other step."""

    def build(self) -> None:
        self.norm, self.odd = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train(self.global_step % 2 == 0)
        return self.last(self.norm(self.first(x)) * self.odd)


class LoadedIn16Bits(Net):
    """BatchNorm whose statistics were loaded in 16 bits too, which torch refuses beside fp32 weights."""

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Hooked(Net):
    """Hooks on gradients: before the model is sharded, after it and for one step, and one of them is removed."""

    def build(self) -> None:
        # What is not linear shows whether it is done before the reduction.
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        self.first.bias.register_hook(lambda gradient: gradient.sign())
        self.removed = self.last.bias.register_hook(torch.zeros_like)

    def on_train_start(self) -> None:
        self.last.weight.register_hook(lambda gradient: gradient.abs())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.brief = self.last.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        if batch_idx == 2:
            self.removed.remove()
            self.brief.remove()


class HookedLater(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.last.weight.register_hook(lambda gradient: gradient.abs())


class Listed(Net):
    """Keeps its parameters in lists and dicts of its own, beside a recurrent module, whose list torch keeps."""

    def build(self) -> None:
        self.recurrent = nn.GRU(WIDTH, WIDTH)
        self.groups = {"all": [(self.first.weight, self.last.weight)]}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self) -> Any:
        return self.weight, {"bias": self.bias}


class ReturnsParameters(Net):
    """A module gives others its parameters, one in a container of its output; one without any runs on one rank."""

    def build(self) -> None:
        self.pair, self.clip = Pair(), nn.Hardtanh()

    def forward(self, x: Tensor) -> Tensor:
        weight, others = self.pair()
        if self.global_rank == 1:
            x = self.clip(x)
        return super().forward(functional.linear(x.to(weight.dtype), weight, others["bias"]).tanh() + x)


KINDS = [Codebook, FrozenEveryOtherStep, LoadedIn16Bits, ReturnsParameters]


def _refusal(kind: type[Net], name: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        fit(kind, name, "32-true")
    return str(error.value)


def test_hooks_on_parameters_that_shards_would_not_run_are_refused() -> None:
    for kind, names in ((Hooked, "first.weight, first.bias, last.bias"), (HookedLater, "last.weight")):
        for said in run_distributed(_refusal, 2, kind, "shard_fsdp"):
            assert f"Hooks are registered on the parameters {names}, but" in said


def test_hooks_on_parameters_run_under_zero() -> None:
    assert run_distributed(_different, 2, Hooked, NAMES[1:], "32-true") == [[], []]


@pytest.mark.parametrize("name", ["shard_fsdp", "shard_deepspeed_stage_3"])
def test_lists_of_parameters_that_would_not_follow_are_refused(name: str) -> None:
    for said in run_distributed(_refusal, 2, Listed, name):
        assert said.startswith("groups is a dict that holds the parameters first.weight, last.weight, but")


class Mapped(Net):
    """Runs its layers under torch.func's transforms."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        rows = torch.func.vmap(lambda row: Net.forward(self, row.unsqueeze(0)).squeeze(0))(x)
        slopes = torch.func.vmap(torch.func.jacrev(partial(Net.forward, self)))(x)
        return functional.mse_loss(rows.float(), x.roll(1, 1)) + slopes.float().square().mean()


def fit(kind: Callable[[], Net], name: str, precision: str, **options: Any) -> dict[str, Tensor | None]:
    module = kind()
    trainer = quiet_trainer(strategy=build(f"{name}_aligned", **options), max_steps=4, precision=precision)
    trainer.fit(module, DataLoader(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3)), 4))
    return module.found


def _different(kind: Callable[[], Net], names: list[str], precision: str) -> list[str]:
    wanted, plain = fit(kind, "shard_ddp", precision), fit(Net, "shard_ddp", precision)
    assert any(not torch.equal(wanted[n], plain[n]) for n in plain), "the module does nothing"  # type: ignore[arg-type]
    found = {name: fit(kind, name, precision) for name in names}
    return [f"{e} {n}" for e, values in found.items() for n in wanted if not torch.equal(values[n], wanted[n])]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_engines_agree_bitwise(kind: type[Net]) -> None:
    assert run_distributed(_different, 2, kind, NAMES, "32-true") == [[], []]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_engines_agree_bitwise_in_bf16(kind: type[Net]) -> None:
    names = [*NAMES, "shard_fsdp_grad_op", "shard_fsdp_offload"]
    assert run_distributed(_different, 2, kind, names, "bf16-mixed") == [[], []]


class Transformed(Net):
    """Runs itself, which FSDP and stage 3 gather, under a transform."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        out, slopes = torch.func.jvp(self, (x,), (x,))
        return functional.mse_loss(out.float(), x) + slopes.float().square().mean()


class Twice(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


def _two_passes(names: list[str]) -> None:
    for name in names:
        with pytest.raises(ConfigurationError, match="runs two backward passes from one loss"):
            fit(Twice, name, "32-true")


def test_two_backward_passes_of_an_automatic_step_are_refused() -> None:
    run_distributed(_two_passes, 2, ["shard_ddp", *NAMES])


def _refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)transform of torch.func .* runs .*Use torch.autograd.grad"):
        fit(Transformed, name, "32-true")


@pytest.mark.parametrize("name", ["shard_fsdp", "shard_deepspeed_stage_3"])
def test_transforms_of_what_is_gathered_are_refused(name: str) -> None:
    run_distributed(_refused, 2, name)


def test_functional_transforms() -> None:
    assert run_distributed(_different, 2, Mapped, NAMES[:-1], "32-true") == [[], []]


def _codes(name: str) -> list[Tensor]:
    module = Codebook()
    flags: dict[str, Any] = {"accumulate_grad_batches": 3, "max_steps": 2}
    strategy = build(name, accumulate_sync="boundary") if "deepspeed" not in name else build(name)
    trainer = quiet_trainer(strategy=strategy, **flags)
    seen: list[Tensor] = []
    module.first.register_forward_pre_hook(lambda *_: seen.append(module.codes.clone()))
    trainer.fit(module, DataLoader(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3)), 4))
    for number, codes in enumerate(seen):
        of_rank_0 = codes.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(codes, of_rank_0) or (number % 3 and dist.get_rank())
    return seen


def _all_codes(names: list[str]) -> list[bool]:
    first, *others = (_codes(name) for name in names)
    return [len(first) == 6 and all(map(torch.equal, first, other)) for other in others]


def _grown(shape: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """A buffer that is larger on one rank, and one that grows on all after the first steps, beside one that stays."""
    rank, module = dist.get_rank(), nn.Module()
    full = partial(torch.full, fill_value=float(rank), device=stand_in.NAME if stand_in.chosen() else "cpu")
    module.register_buffer("own", full((2 + rank,)))
    module.register_buffer("stays", full((3,)))
    module.register_buffer("grows", full(shape, dtype=torch.bfloat16))
    shared = SharedBuffers(module)
    for _ in range(4):
        shared.share()
    module.grows, module.stays[:] = full((9,)), float(rank)
    shared.share()
    return [float(module.own.max()), float(module.stays.max())], module.grows.tolist()[:1]


@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_buffers_of_each_ranks_own_shape_are_left_alone(shape: tuple[int, ...]) -> None:
    assert run_distributed(_grown, 2, shape) == [([0.0, 0.0], [0.0]), ([1.0, 0.0], [1.0])]


def test_buffers_are_rank_0s_at_the_beginning_of_a_step() -> None:
    names = ["shard_ddp_aligned", "shard_fsdp_aligned", "shard_deepspeed_stage_1_aligned"]
    assert run_distributed(_all_codes, 2, names) == [[True, True]] * 2
