"""Modules with state of their own, scalars, and hooks of users: every engine has the numbers of DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_shard import full_tensor
from lightning_shard.registry import build
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.strategies.indexed import Indexed, refusal, same_everywhere

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
    """Rounds to codes that are averages of each rank's samples, as VQ-VAE's are, in a buffer that is made anew each
    time. BatchNorm, loaded in 16 bits, computes with its running statistics in every other step.
    """

    def build(self) -> None:
        self.norm, self.odd = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.ones(()))
        self.to(torch.bfloat16)
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train(self.global_step % 2 == 0)
        hidden = self.norm(self.first(x)) * self.odd
        with torch.no_grad():
            nearest = functional.one_hot(torch.cdist(hidden.float(), self.codes).argmin(1), 5).float()
            self.codes = 0.5 * self.codes + 0.5 * nearest.T @ hidden.float()
            code = nearest @ self.codes
        return self.last(hidden + (code - hidden).detach())


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


KINDS = [Codebook]


class Listed(Net):
    """Keeps its parameters in a dict of its own, besides a recurrent module, whose list torch keeps."""

    def build(self) -> None:
        self.recurrent = nn.GRU(WIDTH, WIDTH)
        self.groups = {"all": [(self.first.weight, self.last.weight)]}


@pytest.mark.parametrize(
    "name", sampled(["shard_deepspeed_stage_1", "shard_deepspeed_stage_2", "shard_deepspeed_stage_3"], 1)
)
def test_hooks_on_parameters_run_under_zero(name: str) -> None:
    assert run_distributed(_different, 2, Hooked, [name], "32-true") == [[], []]


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
    wanted = fit(kind, "shard_ddp", precision)
    found = {name: fit(kind, name, precision) for name in names}
    return [f"{e} {n}" for e, values in found.items() for n in wanted if not torch.equal(values[n], wanted[n])]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sampled(KINDS, 0))
def test_engines_agree_bitwise(kind: type[Net]) -> None:
    assert run_distributed(_different, 2, kind, NAMES, "32-true") == [[], []]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
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


REFUSED = [
    (Hooked, "shard_fsdp", "Hooks are registered on the parameters first.weight, first.bias, last.bias, but"),
    (Listed, "shard_fsdp", "groups is a dict that holds the parameters first.weight, last.weight, but"),
    (Transformed, "shard_fsdp", "Use torch.autograd.grad"),
    (Transformed, "shard_deepspeed_stage_3", "Use torch.autograd.grad"),
    (Twice, "shard_ddp", "runs two backward passes from one loss"),
    (Twice, "shard_fsdp", "runs two backward passes from one loss"),
    (Twice, "shard_deepspeed_stage_2", "runs two backward passes from one loss"),
]


def _refusals() -> list[str]:
    wrong = []
    for kind, name, said in REFUSED:
        error, message = refusal(fit, kind, name, "32-true")
        if error != "ConfigurationError" or said not in message:
            wrong.append(f"{kind.__name__}, {name}: {error}: {message}")
    return wrong


def test_what_engines_can_not_do_as_ddp_does_is_refused() -> None:
    assert run_distributed(_refusals, 2) == [[], []]


def test_functional_transforms() -> None:
    assert run_distributed(_different, 2, Mapped, ["shard_fsdp", "shard_deepspeed_stage_2"], "32-true") == [[], []]


class Never(nn.Module):
    """Has parameters for others to read, and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.73))
        self.listed = nn.ParameterList([nn.Parameter(torch.tensor(0.31))])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gates = nn.Linear(3, 3), nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.57))})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gates["a"].exp()


class ReadElsewhere(Indexed):
    """By the LightningModule, by a module around them, and in the recomputation of a checkpoint; two steps a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gated, self.never = Gated(), Never()
        self.named = nn.ParameterDict({"b": nn.Parameter(torch.tensor(0.37))})
        self.frozen = nn.Parameter(torch.tensor(1.01), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        read = (self.named["b"], self.never.scale, self.never.listed[0], self.gated.gates["a"], self.frozen)
        assert {scalar.dtype for scalar in read} == {torch.float32}
        x = checkpoint(self.gated, x, use_reentrant=False) * self.frozen
        return super().forward(x) * (-self.named["b"]).exp() * self.never.scale + self.never.listed[0]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, "train"))
            optimizer.step()


@pytest.mark.matrix
def test_where_scalars_are_read_makes_no_difference() -> None:
    same_everywhere(ReadElsewhere, "bf16-mixed", strategies=("ddp", "full", "zero_2", "zero_3"))
