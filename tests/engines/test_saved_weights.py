"""What autograd keeps of the parameters that stage 3 gathers: no bytes, the same gradients, and errors where due."""

from __future__ import annotations

import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_shard import ShardDeepSpeedStrategy
from lightning_shard.engines.zero.config.fields import Stage3Options
from lightning_shard.errors import ConfigurationError
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import Block, TinyLM, loader, quiet_trainer
from tests.strategies.engines import differences
from tests.strategies.zero import Manual, fit_all

# Nothing stays whole, and everything is freed after use: what ZeRO-3 does to a model that is large enough.
FREED = Stage3Options(
    param_persistence_threshold=0, max_live_parameters=1, max_reuse_distance=1, prefetch_bucket_size=1
)
WIDTH, DEPTH = 64, 4


def _strategy(**settings: Any) -> ShardDeepSpeedStrategy:
    return ShardDeepSpeedStrategy(**{"stage": 3, "aligned": True, "stage3": FREED, **settings})


# Bytes


class _Alive(pl.Callback):
    """The bytes of gathered weights that are still in memory when forward has ended, by step."""

    def before_sharding(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy.memory.note_module()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.predicted = trainer.strategy.memory.predicted(trainer.optimizers).device.gathered
        self.gathered: list[tuple[weakref.ref[Any], int]] = []
        self.alive: list[int] = []
        self.meter = trainer.strategy.memory.step_meter()
        layers = [layer for block in module.blocks for layer in (block.up, block.down)]
        for layer in layers:
            # DeepSpeed's hook, which gathers, was there before.
            layer.register_forward_pre_hook(self.note)

    def note(self, layer: nn.Module, args: Any) -> None:
        storage = layer.weight.untyped_storage()
        self.gathered.append((weakref.ref(storage), storage.nbytes()))

    def on_train_batch_start(self, *args: Any) -> None:
        self.gathered.clear()
        if not self.alive:
            self.meter.watch_forward()

    def on_before_backward(self, *args: Any) -> None:
        if not self.alive:
            self.meter.count_saved()
        assert len(self.gathered) == 2 * DEPTH
        self.alive.append(sum(size for storage, size in self.gathered if storage() is not None))


def _alive(precision: str, aligned: bool) -> tuple[list[int], int, int, int]:
    alive = _Alive()
    trainer = quiet_trainer(strategy=_strategy(aligned=aligned), precision=precision, max_steps=3, callbacks=[alive])
    trainer.fit(TinyLM(width=WIDTH, depth=DEPTH), loader())
    account = alive.meter.account.device
    return alive.alive, account.gathered, account.activations, alive.predicted


@pytest.mark.parametrize(("precision", "aligned"), sampled([("bf16-mixed", True), ("bf16-mixed", False)], 0))
def test_no_gathered_weight_is_kept_until_backward(precision: str, aligned: bool) -> None:
    up, root = (3 * WIDTH + 1) * WIDTH + 3 * WIDTH + 1, 2 * WIDTH
    block = sum(p.numel() for p in Block(WIDTH, 0.0).parameters())
    for alive, gathered, activations, predicted in run_distributed(_alive, 2, precision, aligned):
        assert alive == [0, 0, 0]
        # The largest layer and what the module itself uses; all layers' weights together would be eight times that.
        assert gathered == 2 * (up + root)
        # The planner, which keeps none either, gathers blocks, and of those two at most.
        assert gathered <= predicted <= 2 * 2 * block
        # Hooks around the step are asked for everything else.
        assert activations > 0


# Numbers


class _Square(torch.autograd.Function):
    """Keeps a parameter, a view of it and an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.tanh(x * weight)
        ctx.save_for_backward(x, weight, weight[::2], out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, half, out = ctx.saved_tensors
        assert torch.equal(weight[::2], half)
        inner = gradient * (1 - out * out)
        return inner * weight, (inner * x).flatten(0, -2).sum(0)


class _Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.table = nn.Parameter(torch.linspace(-1, 1, 3 * width).view(3, width))

    def forward(self, x: Tensor) -> Tensor:
        # A row of a parameter, which does not begin where it does, and one that has more dims.
        return _Square.apply(x, self.weight) * self.table[1] + x * self.table[None, 2]


class _Rich(TinyLM):
    """Weights in convolutions, attention and own functions; used twice, by another module, recomputed, retained."""

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        super().configure_model()
        self.convolution = nn.Conv1d(self.width, self.width, 3, padding=1)
        self.attention = nn.MultiheadAttention(self.width, 2, batch_first=True)
        self.gate = _Gate(self.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.frozen + self.shift
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.gate(self.gate(x))
        first, *others = self.blocks
        x = checkpoint(first, x, use_reentrant=False)
        for block in others:
            x = block(x)
        # A weight of a module that has ended, as tied embeddings are used.
        x = x + functional.linear(functional.linear(x, first.up.weight), first.down.weight)
        return self.head(x) + functional.linear(x, self.embed.weight)


class _RichByHand(_Rich, Manual):
    """Backward runs inside of the step."""


@pytest.mark.matrix
def test_gradients_are_those_of_weights_that_are_kept() -> None:
    """DeepSpeed's default keeps weights of this size whole."""
    for kind, precision in ((_Rich, "bf16-mixed"), (_RichByHand, "32-true")):
        runs = [
            run_distributed(fit_all, 2, ["zero_3"], kind, precision, strategy, {"max_steps": 3}, timeout=240)
            for strategy in ({}, {"stage3": FREED})
        ]
        for kept, freed in zip(*runs, strict=True):
            for part in ("parameters", "optimizer"):
                assert differences(kept["zero_3"][part], freed["zero_3"][part]) == {}, (kind, part)
            assert freed["zero_3"]["losses"] == kept["zero_3"]["losses"]


# Errors, and hooks of others


class _OfItsOwn(Manual):
    """Does what few do; in one step, because DeepSpeed expects the same modules in each."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for part in (self.ungathered, self.stale, self.overwritten, self.transformed):
            self.reached = part.__name__
            part(batch)

    def overwritten(self, batch: Any) -> None:
        """What backward needs was changed in place: an activation, and a gathered parameter."""
        x = self.embed(batch[0]) * 2
        y = x * x
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        layer = self.blocks[0].up
        loss = layer(self.embed(batch[0])).float().sum()
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def ungathered(self, batch: Any) -> None:
        """Of this use DeepSpeed knows nothing, and gathers nothing for its backward."""
        import deepspeed

        weight = self.head.weight
        x = torch.ones(2, self.width, requires_grad=True)
        with deepspeed.zero.GatheredParameters([weight]):
            expected = weight.detach().sum(0).expand(2, -1).clone()
            y = functional.linear(x, weight)
        assert weight.ds_status.name == "NOT_AVAILABLE"
        (gradient,) = torch.autograd.grad(y.sum(), [x])
        assert gradient.abs().sum() > 0
        # Sums of 37 products in another order.
        torch.testing.assert_close(gradient, expected)
        assert weight.ds_status.name == "NOT_AVAILABLE"

    def stale(self, batch: Any) -> None:
        """Backward through a forward pass of before the step."""
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.optimizers().step()
        self.optimizers().zero_grad()
        with pytest.raises(ConfigurationError, match=r"before an optimizer step.* Run forward again"):
            self.manual_backward(loss)

    def transformed(self, batch: Any) -> None:
        torch.func.grad(torch.sum)(torch.ones(3))


def _by_hand() -> None:
    module = _OfItsOwn()
    # The last part's error ends the fit.
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        quiet_trainer(strategy=_strategy(), max_steps=2).fit(module, loader())
    assert module.reached == "transformed"


def test_steps_that_do_something_of_their_own() -> None:
    run_distributed(_by_hand, 2)
