"""Runs for `test_gpu`, each on the device of its process, a CPU too: there `test_on_devices` runs them all.

Every function is called in new processes with a process group, `examples.benchmarks.processes.run_processes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from examples.benchmarks.processes import Place
from lightning_shard import registry
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from lightning_shard.strategies.precision import ShardPrecision
from tests.checkpoint.compare import stored
from tests.models import VOCAB, Final, TinyLM, Tokens, loader, quiet_trainer
from tests.strategies.engines import NORM, TWICE, relative
from tests.strategies.zero import Manual

REFERENCE = "shard_fsdp_aligned"
HYBRID = "two nodes of half of the devices"


class Wide(TinyLM):
    """With an embedding of ``rows``, whose gradient is the last that backward makes."""

    def __init__(self, rows: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = rows

    def configure_model(self) -> None:
        if not hasattr(self, "table"):
            super().configure_model()
            self.table = nn.Embedding(self.rows, self.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.table(tokens * (self.rows // VOCAB)) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WideManual(Manual, Wide):
    """Accumulates, clips and steps by hand."""


class Odd(TinyLM):
    """With running statistics, and a trainable parameter that has no dimension, as CLIP's ``logit_scale``."""

    def configure_model(self) -> None:
        if not hasattr(self, "norm"):
            super().configure_model()
            self.norm, self.logit_scale = nn.BatchNorm1d(self.width), nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm((self.embed(tokens) + self.shift).flatten(0, 1))
        return self.head(normed).view(*tokens.shape, -1) * self.logit_scale


class Fused(TinyLM):
    """Steps in one kernel."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, fused=True)


class Steady(TinyLM):
    """Reads no value."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Has no length; rank 1 has a batch of four less than the others."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        share = [*Tokens(40 * ranks)][rank::ranks]
        yield from share[: len(share) - 4 * (rank == 1)]


CASES: dict[str, tuple[type[TinyLM], dict[str, Any]]] = {
    "clipped": (TinyLM, NORM),
    "wide, accumulated and clipped": (Wide, {**NORM, **TWICE}),
    "wide, by hand": (WideManual, {}),
    "running statistics and a scalar": (Odd, NORM),
    "a stream": (TinyLM, {}),
}


def fit(
    place: Place, name: str, precision: Any, module: TinyLM, data: Any = None, ckpt_path: Any = None, **trainer: Any
) -> tuple[dict[str, Tensor], pl.Trainer]:
    """Train; the full parameters and optimizer state of the end, on the host."""
    pl.seed_everything(1, verbose=False)
    final, ranks = Final(), dist.get_world_size()
    replicate = 2 if ranks % 4 == 0 else 1
    mesh = MeshConfig(replicate=replicate, shard=ranks // replicate)
    strategy = ShardFSDPStrategy(mesh=mesh, aligned=True) if name == HYBRID else registry.build(name)
    strategy.async_save = trainer.pop("async_save", False)
    settings = {
        "accelerator": "gpu" if place.device.type == "cuda" else "cpu",
        "strategy": strategy,
        "plugins": [ShardPrecision(precision)],
        "max_steps": 10,
        "callbacks": [final, *trainer.pop("callbacks", [])],
    }
    loop = quiet_trainer(**{**settings, **trainer})
    loop.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    assert loop.strategy.root_device.type == place.device.type
    found = {**final.parameters, **final.optimizer}
    return {key: value.cpu() for key, value in found.items()}, loop


def alike(place: Place, names: list[str], precision: str, case: str, model: dict[str, Any]) -> dict[str, float]:
    """How far each name's end is from the reference's, in units of each tensor's largest element."""
    kind, trainer = CASES[case]
    found = {}
    for name in [REFERENCE, *names]:
        data = DataLoader(Stream(), batch_size=4) if case == "a stream" else None
        if case == "a stream":
            trainer = {"max_epochs": 1, "max_steps": -1}
        module = kind(**model)
        found[name], loop = fit(place, name, precision, module, data, **trainer)
        assert loop.global_step == {"a stream": 9 if dist.get_world_size() > 1 else 10}.get(case, 10)
    return {name: relative(found[REFERENCE], found[name]) for name in names}


class SaveThird(pl.Callback):
    """Saves after three steps, and the fit goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def saves(place: Place, name: str, folder: str) -> list[str]:
    """Tensors of a checkpoint that differ between a save that is waited for and one in the background."""
    paths = [Path(folder, f"{name}-{is_async}.ckpt") for is_async in (False, True)]
    for path, is_async in zip(paths, (False, True), strict=True):
        fit(place, name, "bf16-mixed", TinyLM(width=64), callbacks=[SaveThird(path)], async_save=is_async)
    dist.barrier()
    waited, background = map(stored, paths)
    assert len(waited) > 20
    return [key for key, value in waited.items() if not torch.equal(value, background[key])]


def resumed(place: Place, name: str, precision: str, folder: str) -> float:
    """How far a run that goes on from its third step ends from one that was not stopped, with dropout."""
    path = Path(folder, f"{name}.ckpt")
    through, _ = fit(place, name, precision, Fused(dropout=0.1), callbacks=[SaveThird(path)], max_steps=6)
    again, _ = fit(place, name, precision, Fused(dropout=0.1), ckpt_path=path, max_steps=6)
    return relative(through, again)


class NoWaits(pl.Callback):
    """A wait of the host for the device is an error from the tenth step to the twelfth."""

    steps = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 9:
            _forbid_waits(trainer, "error")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.steps += trainer.global_step > 9
        if trainer.global_step == 12:
            _forbid_waits(trainer, "default")


def _forbid_waits(trainer: pl.Trainer, mode: str) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def steady(place: Place, name: str, precision: str) -> int:
    """Steps that were taken without a wait; one with a wait raises."""
    callback = NoWaits()
    data = loader(pin_memory=place.device.type == "cuda")
    fit(place, name, precision, Steady(), data, callbacks=[callback], max_steps=12)
    return callback.steps
