"""Parts that are frozen and thawed in mid-fit: the same numbers on every engine that follows, and after a resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback, ModelCheckpoint
from torch import Tensor, nn

from tests.harness import run_distributed
from tests.models import quiet_trainer, whole
from tests.optimizers import Lamb
from tests.strategies.indexed import Indexed, data, refusal

NAMES = ["shard_ddp", "shard_fsdp", "shard_fsdp_hybrid", "shard_fsdp_grad_op", "shard_fsdp_offload"]
EPOCHS = 4  # Thawed in the second.


class Scale(nn.Module):
    """Its parameter has no dimension, so that FSDP leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Backbone(Indexed):
    """`BackboneFinetuning` wants the part to be thawed under this name; its blocks are shard units."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Identity()
        sizes = [3, 8, 8, 8]
        blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
        self.backbone = nn.Sequential(*blocks, Scale())
        self.epochs: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x)).squeeze(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

    def on_train_epoch_end(self) -> None:
        self.epochs.append({n: whole(p) for n, p in self.named_parameters()})


class Refreezing(BaseFinetuning):
    """The head alone, then all, then the body alone."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.05)
        if epoch == 2:
            pl_module.head.requires_grad_(False)


def fit(strategy: str, precision: str, kind: str, *, folder: str = "", resume: str | None = None) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = Backbone()
    saving: list[Callback] = [ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)] if folder else []
    thawing = Refreezing() if kind == "refreeze" else BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    trainer = quiet_trainer(
        strategy=strategy,
        precision=precision,
        max_epochs=EPOCHS,
        callbacks=[thawing, *saving],
        enable_checkpointing=bool(saving),
    )
    trainer.fit(module, data(), ckpt_path=resume)
    [optimizer] = trainer.optimizers
    slots = {n: optimizer.state.get(p, {}).get("momentum_buffer") for n, p in module.named_parameters()}
    return {
        "epochs": module.epochs,
        "momentum": {name: whole(slot) for name, slot in slots.items() if slot is not None},
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def fit_all(names: list[str], precision: str, kind: str, folder: str) -> list[dict[str, Any]]:
    """A run of each name without a break, and of each one that goes on from epochs that the first one saved."""
    runs = [fit(name, precision, kind, folder="" if index else folder) for index, name in enumerate(names)]
    for epoch in (0, 1, 2):
        runs += [fit(name, precision, kind, resume=f"{folder}/epoch={epoch}.ckpt") for name in names]
    return runs


def check(names: list[str], precision: str, kind: str, folder: Path) -> None:
    torch.manual_seed(1)
    start = {name: p.detach() for name, p in Backbone().named_parameters()}
    for first, *others in run_distributed(fit_all, 2, names, precision, kind, str(folder), timeout=300):
        for index, run in enumerate(others):
            for found, wanted in zip(run["epochs"][::-1], first["epochs"][::-1], strict=False):
                same(found, wanted, index)
            same(run["momentum"], first["momentum"], index)
            assert run["rates"] == first["rates"], index
        moved = [
            {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
            for before, after in itertools.pairwise([start, *first["epochs"]])
        ]
        last = {"backbone"} if kind == "refreeze" else {"backbone", "head"}
        assert moved == [{"head"}, {"backbone", "head"}, last, last]
        assert "backbone.0.0.weight" in first["momentum"]


def same(one: dict[str, Tensor], other: dict[str, Tensor], index: int) -> None:
    assert one.keys() == other.keys(), index
    assert [name for name in one if not torch.equal(one[name], other[name])] == [], index


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["backbone", "refreeze"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("suffix", ["", "_aligned"])
def test_thawing_and_its_resume_under_every_name(tmp_path: Path, suffix: str, precision: str, kind: str) -> None:
    check([f"{name}{suffix}" for name in NAMES], precision, kind, tmp_path)


class Moments(Backbone):
    def configure_optimizers(self) -> Any:
        return Lamb([p for p in self.parameters() if p.requires_grad])


class Low(Refreezing):
    def freeze_before_training(self, pl_module: Any) -> None:
        pl_module.backbone.to(torch.bfloat16)
        super().freeze_before_training(pl_module)


def _finetunes(strategy: str, kind: type[Backbone], callback: type[Refreezing]) -> None:
    quiet_trainer(strategy=strategy, precision="bf16-mixed", max_epochs=2, callbacks=[callback()]).fit(kind(), data())


@pytest.mark.parametrize(
    ("strategy", "kind", "callback", "said"),
    [
        ("shard_deepspeed_stage_1", Backbone, Refreezing, "Refreezing freezes and thaws parameters, but ShardDeepSpee"),
        ("shard_fsdp", Moments, Refreezing, "add_param_group is called in a fit, but ShardFSDPStrategy steps"),
        ("shard_fsdp", Backbone, Low, "7 parameters were thawed that were frozen in torch.bfloat16 when the fit began"),
    ],
)
def test_thawing_where_an_engine_can_not_follow_is_refused(
    strategy: str, kind: type[Backbone], callback: type[Refreezing], said: str
) -> None:
    for error, message in run_distributed(refusal, 2, _finetunes, strategy, kind, callback):
        assert error == "ConfigurationError"
        assert said in message
