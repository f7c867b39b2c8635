"""Buffers with ``persistent=False`` and an optimizer's own numbers go on after a resume; what a module or a
callback keeps as attributes is told.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.run.data import other_numbers
from lightning_shard.tensors import nonpersistent
from tests.harness import run_distributed
from tests.models import quiet_trainer

WIDTH = 4


class Meter:
    """The helper object that so many modules have."""

    def __init__(self) -> None:
        self.sum, self.name = 0.0, "loss"


class Counts(pl.Callback):
    def __init__(self, first: str | None) -> None:
        self.batches, self.saved, self.first = 0, 0, first

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.first is not None:
            trainer.save_checkpoint(self.first)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        self.saved += 1

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state["saved"]


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
        self.calls, self.norm.seen, self.losses = 0, 0.5, [torch.zeros(2)]  # type: ignore[assignment]
        self.meter, self.keys, self.same = Meter(), torch.zeros(100), torch.ones(100)
        self.norm.register_buffer("mask", torch.ones(WIDTH), persistent=False)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        own: Any = self.norm
        self.calls += 1
        own.seen += 1
        self.losses.append(torch.zeros(2))
        self.meter.sum += 0.5
        self.keys[batch_idx] = 1
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["calls"] = self.calls

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls = checkpoint["calls"]

    def left(self) -> list[Any]:
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.parameters()]
        return [t.tolist() for t in (*weights, *self.norm.buffers())]


def _fit(
    steps: int, path: str | None = None, save: str | None = None, first: str | None = None
) -> tuple[list[Any], list[str]]:
    settings: dict[str, Any] = {"strategy": "shard_fsdp", "max_steps": steps, "log_every_n_steps": 1}
    module, trainer = Queue(), quiet_trainer(**settings, callbacks=[Counts(first)])
    data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, 4, shuffle=True), ckpt_path=path)  # type: ignore[arg-type]
    if save:
        trainer.save_checkpoint(save)
    said = [str(each.message) for each in caught]
    return module.left(), [each for each in said if "persistent=False" in each or "as attributes" in each]


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
    (number,), none = (said for _, _, said, _ in results)
    shown = (
        "losses (4 values then, 1 values now), meter.sum (1.5 then, 0.0 now), keys (a tensor of sum 3 then, a tensor"
    )
    assert (
        f"begins anew: {shown} of sum 0 now), norm.seen (3.5 then, 0.5 now), callback Counts.0.batches (3 then, 0"
        in number
    )
    assert not any(f" {name} (" in number for name in ("calls", "same", "callback Counts.0.saved", "meter.name"))
    assert none == []
    assert results[0][0] != results[1][0], "both ranks have the same queue"
    lost = next(said for said in results[0][3] if "persistent" in said)
    assert lost.startswith("Buffers with persistent=False that steps have changed begin anew: norm.cache, norm.mean")


def test_values_of_a_callback_that_is_gone_are_not_told() -> None:
    saved = {"callback Gone.0.count": "1", "callback Here.0.count": "1", "made": "1", "same": "1"}
    told = other_numbers(saved, {"callback Here.0.count": "0", "same": "1"})
    assert told is not None
    assert "anew: callback Here.0.count (1 then, 0 now), made (1 then, not there now). Where" in told
    assert other_numbers({"callback Gone.0.count": "1"}, {}) is None


def test_only_what_has_changed_is_saved() -> None:
    module = Queue()
    known = nonpersistent.known_buffers(module)
    assert nonpersistent.changed_buffers(module, known) == {}
    module.norm.count += 1  # type: ignore[operator]
    assert list(nonpersistent.changed_buffers(module, known)) == ["norm.count"]
