"""The aligned contract: what breaks it is caught on every rank, and plain names only record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard.engines import _fsdp2
from lightning_shard.errors import ConfigurationError, PrecisionContractError
from lightning_shard.precision.ledger import Ledger
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.precision.ledger.test_record import stages
from tests.precision.ledger.zoo import ENGINES, assert_nothing_left, fit

BF16, FP32 = torch.bfloat16, torch.float32


# The contract


class LowMomentum(torch.optim.SGD):
    """Keeps its momentum in bf16, as optimizers that save memory do."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter, dtype=BF16)
        return result


def _bf16_state(module: Any) -> None:
    module.configure_optimizers = lambda: LowMomentum([p for p in module.parameters() if p.requires_grad], lr=0.1)


def _bf16_buffer(module: Any) -> None:
    module.on_train_start = lambda: setattr(module.blocks[1], "scale", module.blocks[1].scale.to(BF16))


def _recast(module: Any) -> None:
    module.on_train_start = lambda: setattr(module.frozen, "data", module.frozen.data.to(BF16))


def _buffer_on_rank_1(module: Any) -> None:
    if dist.get_rank() == 1:
        _bf16_buffer(module)


def _bf16_gradients(module: Any) -> None:
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)

    def replace(optimizer: Any) -> None:
        module.head.weight.grad_dtype = None
        module.head.weight.grad = module.head.weight.grad.to(BF16)

    module.on_before_optimizer_step = replace


def broken(engines: list[str], precision: str, breaks: list[Callable[[TinyLM], None]]) -> dict[Any, str]:
    """Each run's message, the same under ``aligned``; and what the plain name's ledger says of it."""
    found: dict[Any, str] = {}
    for engine in engines:
        for spoil in breaks:
            module = TinyLM()
            module.configure_model()
            spoil(module)
            strategy = ENGINES[engine](aligned=True)
            trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=3)
            try:
                trainer.fit(module, loader())
                found[engine, spoil.__name__] = "not caught"
            except (ConfigurationError, PrecisionContractError) as error:
                found[engine, spoil.__name__] = str(error)
            assert_nothing_left(module, [])
            assert trainer.global_step <= 1
    return found


def assert_caught(world: list[dict[Any, str]], name: str, *parts: str) -> None:
    messages = {message for rank in world for key, message in rank.items() if key[1] == name}
    assert len({str(sorted(r.items(), key=str)) for r in world}) == 1, "ranks disagree"
    assert messages
    for message in messages:
        assert message.startswith("The aligned precision contract is broken ")
        assert all(part in message for part in parts), message


BREAKS: list[Any] = [_bf16_state, _recast, _buffer_on_rank_1, _bf16_gradients]


def test_broken_set_ups_are_caught_on_every_rank_alike() -> None:
    world = run_distributed(broken, 2, ["full"], "bf16-mixed", BREAKS, timeout=240)
    assert_caught(world, "_bf16_state", "is bf16 at the stage state.momentum, required is fp32", "Leave all")
    # Refused where it is written, by the engines whose parameters are DTensors.
    recasts = {message for rank in world for (_, name), message in rank.items() if name == "_recast"}
    assert all(m.startswith("parameter.data is set to a DTensor of (12,) and torch.bfloat16") for m in recasts)
    assert len(recasts) == 1
    assert_caught(world, "_buffer_on_rank_1", "step: blocks.1.scale is bf16 at the stage step, required is fp32. ")
    assert_caught(world, "_bf16_gradients", "step: head.weight is bf16 at the stage gradient, required")


def reduced_in_bf16() -> str:
    module = TinyLM()
    with pytest.MonkeyPatch.context() as patch:
        # As in a release of torch whose units would reduce in another dtype than they were told.
        patch.setattr(_fsdp2, "dtypes_of", lambda unit: (BF16, BF16 if unit is module.blocks[1] else FP32))
        with pytest.raises(PrecisionContractError) as error:
            quiet_trainer(strategy=ENGINES["full"](aligned=True), max_steps=1).fit(module, loader())
    return str(error.value)


def test_a_reduction_in_bf16_is_caught() -> None:
    for message in run_distributed(reduced_in_bf16, 2):
        assert message.startswith(
            "The aligned precision contract is broken at the start of the fit: A gradient is bf16 at the stage "
            "reduction, required is fp32. Leave all casts"
        )


class Fails(TinyLM):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        raise RuntimeError("the user's own")


def not_caught() -> Ledger:
    trainer = quiet_trainer(strategy=ShardFSDPStrategy(aligned=True), precision="bf16-mixed", max_steps=3)
    with pytest.raises(RuntimeError, match="the user's own"):
        trainer.fit(module := Fails(), loader())
    assert_nothing_left(module, trainer.optimizers)
    assert trainer.strategy.ledger.dtypes("head.weight", "prepared") == {FP32}  # type: ignore[attr-defined]
    module = TinyLM()
    module.configure_model()
    _bf16_buffer(module)
    ledger: Ledger = fit("full", module, loader(), "bf16-mixed", steps=2, aligned=False).strategy.ledger
    return ledger


def test_plain_names_only_record_and_an_exception_leaves_no_hook() -> None:
    assert stages(run_distributed(not_caught, 2)[0], "blocks.1.scale")["step"] == "bfloat16"
