"""What the stand-in for a GPU finds; these tests run on it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.engines.zero import flat_layout
from tests import stand_in
from tests.harness import run_distributed
from tests.models import TinyLM
from tests.strategies.engines import NORM, differences
from tests.strategies.zero import fit

pytestmark = pytest.mark.skipif(not stand_in.chosen(), reason="set TESTS_DEVICE=stand_in")


def _memory() -> None:
    on_device, pinned = torch.arange(8.0, device=stand_in.NAME), torch.empty(8, pin_memory=True)
    assert torch.empty(8, device=stand_in.NAME).isnan().all()
    pinned.copy_(on_device, non_blocking=True)
    assert pinned.isnan().all()
    back = torch.empty(8, device=stand_in.NAME)
    back.copy_(pinned, non_blocking=True)  # in the order of the stream
    event: Any = torch.Event(stand_in.NAME)
    event.record()
    event.synchronize()
    assert pinned.tolist() == on_device.tolist() == back.tolist()
    for mixed in (torch.add, lambda a, b: torch.stack([a.sum(), b.sum()])):
        with pytest.raises(RuntimeError, match=r"same device|two devices"):
            mixed(on_device, torch.ones(8))


def _freed_early(recorded: bool) -> list[float]:
    """What another stream copies of memory that is freed meanwhile."""
    freed, pinned = torch.ones(4, device=stand_in.NAME), torch.empty(4, pin_memory=True)
    other = stand_in.Stream()
    with other:
        pinned.copy_(freed, non_blocking=True)
    if recorded:
        freed.record_stream(other)
    del freed
    other.synchronize()
    values: list[float] = pinned.nan_to_num(-1).tolist()
    return values


def test_memory_and_copies() -> None:
    run_distributed(_memory, 1)
    assert run_distributed(_freed_early, 1, True) == [[1.0] * 4]
    assert run_distributed(_freed_early, 1, False) == [[-1.0] * 4]


def _without_waits(*arguments: Any) -> dict[str, Tensor]:
    """A fit that reads offloaded gradients without waiting for them."""
    wait = flat_layout.wait_for_offloaded_gradients
    flat_layout.wait_for_offloaded_gradients = lambda zero: None  # type: ignore[assignment]
    try:
        parameters: dict[str, Tensor] = fit(*arguments)["parameters"]
    finally:
        flat_layout.wait_for_offloaded_gradients = wait
    return parameters


def test_a_missing_wait_is_seen() -> None:
    arguments = ("zero_2_offload", TinyLM, "bf16-mixed", {}, NORM)
    waited = run_distributed(fit, 2, *arguments)[0]["parameters"]
    assert differences(run_distributed(fit, 2, "zero_2", *arguments[1:])[0]["parameters"], waited) == {}
    assert differences(run_distributed(_without_waits, 2, *arguments)[0], waited) != {}
