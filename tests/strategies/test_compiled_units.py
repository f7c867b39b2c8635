"""Units that torch.compile compiles: one graph each, and the numbers of eager ones."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ShardDDPStrategy, ShardDeepSpeedStrategy, ShardFSDPStrategy
from lightning_shard.callbacks.memory_report import MemoryCallback
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters
from tests.strategies.test_sharding import fit


class _Attention(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        heads = super().forward(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


class Attends(TinyLM):
    """Has attention, which torch takes for random: where it runs again in backward, the compiler restores a state."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.blocks:
            if not isinstance(block.down, _Attention):
                block.down = _Attention(block.down.in_features, block.down.out_features)


def _compiled(
    checkpointing: Any, kind_of_strategy: Any = ShardFSDPStrategy, *, stage: int | None = None, **settings: Any
) -> TinyLM:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    more = {} if stage is None else {"stage": stage}
    strategy = kind_of_strategy(aligned=True, compile=True, activation_checkpointing=checkpointing, **more)
    # The callback's hooks are there in the first step alone.
    found = fit(strategy, callbacks=[MemoryCallback()], **{"kind": TinyLM, **settings})
    # One for all blocks, casts and checkpoints in it.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    return found


def _check_compiled() -> None:
    # Without dropout, whose numbers the compiler draws otherwise.
    still: dict[str, Any] = {"model": {"dropout": 0.0}}
    expected = fit(ShardFSDPStrategy(), kind=TinyLM, **still)
    found = _compiled(None, **still)
    # The compiler fuses and so rounds differently: a few spacings of fp32 in losses of about 4.
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)
    for name, parameter in whole_parameters(expected).items():
        # AdamW's first steps have the size of the learning rate, 1e-2, whatever the gradient's.
        torch.testing.assert_close(whole_parameters(found)[name], parameter, rtol=0, atol=1e-4)
    assert list(found.state_dict()) == list(expected.state_dict())

    expected = fit(ShardFSDPStrategy(), kind=TinyLM, precision="bf16-mixed", **still)
    found = _compiled("selective", precision="bf16-mixed", **still)
    # What is fused is rounded to bf16 less often: a spacing of bf16, 2^-8.
    torch.testing.assert_close(found.losses, expected.losses, rtol=2**-8, atol=0)
    assert all(map(math.isfinite, _compiled("units", kind=Attends, precision="bf16-mixed").losses))


@pytest.mark.matrix
def test_compiled_units() -> None:
    run_distributed(_check_compiled, 2, timeout=300)


def _check_compiled_elsewhere(cases: list[tuple[Any, ...]]) -> None:
    still: dict[str, Any] = {"model": {"dropout": 0.0}}
    for strategy, stage, precision, checkpointing in cases:
        expected = fit(ShardFSDPStrategy(aligned=True), kind=TinyLM, precision=precision, **still)
        found = _compiled(checkpointing, strategy, stage=stage, precision=precision, **still)
        rtol = 1e-5 if precision == "32-true" else 2**-8
        torch.testing.assert_close(found.losses, expected.losses, rtol=rtol, atol=0)


def _check_graphs(strategy: Any, stage: int | None, checkpointing: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings: dict[str, Any] = {"compile": True, "activation_checkpointing": checkpointing}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        trainer = quiet_trainer(strategy=strategy(**settings, **({"stage": stage} if stage else {})), max_epochs=2)
        trainer.fit(TinyLM(), loader(count=32), loader(count=32, shuffle=False))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # for training and for validation
    assert not torch._dynamo.utils.counters["graph_break"]


KINDS = [
    (ShardFSDPStrategy, None, None),
    (ShardFSDPStrategy, None, "selective"),
    (ShardDeepSpeedStrategy, 2, None),
    (ShardDDPStrategy, None, None),
]


@pytest.mark.parametrize(("strategy", "stage", "checkpointing"), sampled(KINDS, 0))
def test_all_steps_run_two_graphs(strategy: Any, stage: int | None, checkpointing: Any) -> None:
    run_distributed(_check_graphs, 2, strategy, stage, checkpointing)


COMPILED = [
    (ShardDDPStrategy, None, "32-true", None),
    (ShardDeepSpeedStrategy, 2, "bf16-mixed", "selective"),
    (ShardDDPStrategy, None, "bf16-mixed", "units"),
    (ShardDeepSpeedStrategy, 0, "32-true", "units"),
    (ShardDeepSpeedStrategy, 1, "bf16-mixed", None),
]


@pytest.mark.matrix
def test_compiled_blocks_of_other_engines() -> None:
    run_distributed(_check_compiled_elsewhere, 2, COMPILED[:2], timeout=300)


@pytest.mark.matrix
def test_more_compiled_blocks_of_other_engines() -> None:
    run_distributed(_check_compiled_elsewhere, 2, COMPILED[2:], timeout=300)
