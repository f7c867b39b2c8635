"""Buffers with ``persistent=False`` and an optimizer's own numbers go on after a resume."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.tensors import nonpersistent
from tests.harness import run_distributed
from tests.models import quiet_trainer

WIDTH = 4


class SavesFirst(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class Warm(torch.optim.AdamW):
    """Steps by how often it has stepped, which is in none of its groups."""

    calls = 0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.rate = lr

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = self.rate / self.calls
        return super().step(closure)


class Queue(pl.LightningModule):
    """Steps by what earlier batches left: a counter, an average, a queue of keys, a cache that grows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.Module()
        for name, shape in {"count": (), "mean": (WIDTH,), "queue": (6, WIDTH)}.items():
            self.norm.register_buffer(name, torch.zeros(shape), persistent=False)
        self.norm.register_buffer("cache", None, persistent=False)
        self.norm.register_buffer("mask", torch.ones(WIDTH), persistent=False)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        own: Any = self.norm
        key = self.layer(x)
        with torch.no_grad():
            own.count += 1
            own.queue[int(own.count) % 6] = key.mean(0)
            own.mean = 0.9 * own.mean + 0.1 * x.mean(0)
            own.cache = torch.cat([own.cache, x.sum().view(1)]) if own.cache is not None else x.sum().view(1)
        left = key * own.mask * own.queue.mean(0) + own.mean * key
        return left.square().mean() / (own.count + own.cache.std(0, False))

    def configure_optimizers(self) -> Any:
        return Warm(self.parameters(), lr=0.05)

    def left(self) -> list[Any]:
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.parameters()]
        return [t.tolist() for t in (*weights, *self.norm.buffers())]


def _fit(
    steps: int, path: str | None = None, save: str | None = None, first: str | None = None
) -> tuple[list[Any], list[str]]:
    settings: dict[str, Any] = {"strategy": "shard_fsdp", "max_steps": steps, "log_every_n_steps": 1}
    module, trainer = Queue(), quiet_trainer(**settings, callbacks=[SavesFirst(first)] if first else [])
    data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, 4, shuffle=True), ckpt_path=path)  # type: ignore[arg-type]
    if save:
        trainer.save_checkpoint(save)
    said = [str(each.message) for each in caught]
    return module.left(), [each for each in said if "persistent=False" in each]


def _resumed() -> Any:
    whole, _ = _fit(6)
    _fit(3, save="half.ckpt")
    assert not [name for name in Queue().state_dict() if "queue" in name]
    resumed, said = _fit(6, "half.ckpt", first="again.ckpt")
    # Saved ahead of the moment at which a resumed run is given back what is each rank's own.
    assert _fit(6, "again.ckpt")[0] == whole
    nonpersistent._MOST_BYTES = 8
    _fit(3, save="small.ckpt")
    return whole, resumed, said, _fit(6, "small.ckpt")[1]


def test_buffers_that_no_state_dict_has_go_on_on_each_rank() -> None:
    results = run_distributed(_resumed, 2)
    for whole, resumed, _, _ in results:
        assert resumed == whole
    assert results[0][2] == []
    assert results[0][0] != results[1][0], "both ranks have the same queue"
    lost = next(said for said in results[0][3] if "persistent" in said)
    assert lost.startswith("Buffers with persistent=False that steps have changed begin anew: norm.cache, norm.mean")


def test_only_what_has_changed_is_saved() -> None:
    module = Queue()
    known = nonpersistent.known_buffers(module)
    assert nonpersistent.changed_buffers(module, known) == {}
    module.norm.count += 1  # type: ignore[operator]
    assert list(nonpersistent.changed_buffers(module, known)) == ["norm.count"]
