"""Several optimizers in manual optimization: the numbers of DDP on every engine, DeepSpeed's too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from lightning_shard import full_tensor, set_full_tensor
from lightning_shard.registry import build
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.strategies.indexed import refusal

FSDP = "shard_fsdp_aligned"
STAGES = [f"shard_deepspeed_stage_{stage}_aligned" for stage in (1, 2, 3)]
HOST = [f"shard_deepspeed_stage_{stage}_offload_aligned" for stage in (2, 3)]


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Adversaries(pl.LightningModule):
    """A generator, a discriminator and a parameter in a module of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.kind = kind
        self.generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
        self.shift = Shift()
        self.discriminator = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))
        self.found: dict[str, Tensor | None] = {}

    def score(self, x: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(x)
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.shift(self.generator(x))
        return self.score(fake, True), self.score(x[:, :3], True) + self.score(fake.detach(), False)

    def training_step(self, x: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        if self.kind == "one backward":
            # The discriminator's gradients of the generator's loss count too.
            self.manual_backward(sum(self.losses(x)))  # type: ignore[arg-type]
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            return
        for index, optimizer in enumerate(optimizers):
            if self.kind in ("toggled", "accumulated"):
                self.toggle_optimizer(optimizer)
            elif self.kind not in ("module", "own"):
                optimizer.zero_grad()
            self.manual_backward(self.losses(x)[index])
            if self.kind == "accumulated" and batch_idx % 2 == 0:
                self.untoggle_optimizer(optimizer)
                continue
            if self.kind == "own":
                # Between backward and the step.
                name = ("shift.by", "discriminator.2.weight")[index]
                gradient = full_tensor(self.trainer, name, "gradient")
                assert gradient is not None
                set_full_tensor(self.trainer, name, gradient / 2, "gradient")
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.kind == "module":
                self.zero_grad()
            if self.kind == "own":
                optimizer.zero_grad()
            if self.kind == "clamped":
                for parameter in self.parameters():
                    parameter.data.clamp_(-0.2, 0.2)
            if self.kind in ("toggled", "accumulated"):
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        generator = torch.optim.AdamW([*self.generator.parameters(), *self.shift.parameters()], lr=0.02)
        discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (generator, discriminator)]
        return [generator, discriminator], schedules

    def on_train_end(self) -> None:
        self.found = {name: full_tensor(self.trainer, name) for name, _ in self.named_parameters()}
        self.found["momentum"] = full_tensor(self.trainer, "discriminator.0.weight", "momentum_buffer")


class Shared(Adversaries):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.discriminator.parameters(), lr=0.1)]


def _fit(
    name: str, kind: str, *, steps: int = 8, path: Path | None = None, save: Path | None = None, **more: Any
) -> Any:
    pl.seed_everything(1, verbose=False)
    data = torch.randn(64, 4)
    module = Adversaries(kind)
    settings = {"find_unused_parameters": True} if name.startswith("shard_ddp") else {}
    trainer = quiet_trainer(strategy=build(name, hooks_use_accessor=True, **settings), max_steps=steps, **more)
    trainer.fit(module, DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.found


def _different(names: list[str], kind: str, **more: Any) -> dict[str, list[str]]:
    wanted = _fit("shard_ddp_aligned", kind, **more)
    start = dict(Adversaries(kind).named_parameters())
    assert not any(torch.equal(value, wanted[fqn]) for fqn, value in start.items())
    found = {name: _fit(name, kind, **more) for name in names}
    assert all(value is not None for one in found.values() for value in one.values())
    different = {
        name: [f for f, value in one.items() if not torch.equal(value, wanted[f])] for name, one in found.items()
    }
    return {name: fqns for name, fqns in different.items() if fqns}


@pytest.mark.parametrize("kind", sampled(["toggled", "one backward", "leaks", "own"], 0))
def test_engines_agree_bitwise(kind: str) -> None:
    assert run_distributed(_different, 2, [FSDP, *STAGES], kind) == [{}] * 2


@pytest.mark.matrix
def test_gradients_of_an_optimizer_outlast_the_passes_of_others() -> None:
    """Between its two passes the other's has left its parameters alone."""
    assert run_distributed(_different, 2, [STAGES[2], HOST[0]], "accumulated") == [{}] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", ["toggled", "one backward", "leaks"])
def test_engines_agree_bitwise_in_bf16(kind: str, precision: str) -> None:
    assert run_distributed(_different, 2, [FSDP, *STAGES, *HOST], kind, precision=precision) == [{}] * 2


REFUSED: list[tuple[type[Adversaries], str, int, str]] = [
    # Small parameters stay gathered, but the optimizer's masters are written over them.
    (Adversaries, "clamped", 3, "Written to by no optimizer (such as by clamp_, or through parameter.data): "),
    (Adversaries, "module", 2, "zero_grad of AdamW was not called since its last step"),
    (Shared, "toggled", 1, "optimizers that share parameters"),
]


def _refused(module: type[Adversaries], kind: str, stage: int) -> tuple[str, str]:
    trainer = quiet_trainer(strategy=f"shard_deepspeed_stage_{stage}", max_steps=4)
    return refusal(trainer.fit, module(kind), DataLoader(torch.randn(16, 4), 2))


@pytest.mark.parametrize(("module", "kind", "stage", "said"), REFUSED)
def test_what_deepspeed_would_not_see_is_refused(module: type[Adversaries], kind: str, stage: int, said: str) -> None:
    for error, message in run_distributed(_refused, 2, module, kind, stage):
        assert error == "ConfigurationError"
        assert said in message


def _resumed(saved_by: str, names: list[str], folder: Path) -> dict[str, list[str]]:
    wanted = _fit("shard_ddp_aligned", "toggled")
    path = folder / "a.ckpt"
    _fit(saved_by, "toggled", steps=4, save=path)
    found = {name: _fit(name, "toggled", path=path) for name in names}
    return {name: [f for f in wanted if not torch.equal(one[f], wanted[f])] for name, one in found.items()}


@pytest.mark.matrix
@pytest.mark.parametrize("saved_by", sampled([STAGES[1], FSDP], 0))
def test_a_run_goes_on_on_another_engine(saved_by: str, tmp_path: Path) -> None:
    names = [STAGES[1], STAGES[2], FSDP]
    assert run_distributed(_resumed, 2, saved_by, names, tmp_path) == [{name: [] for name in names}] * 2
