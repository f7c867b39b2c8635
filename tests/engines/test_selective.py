"""Selective activation checkpointing: what backward computes again, and what is kept for it."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shard.engines import transforms
from lightning_shard.engines.activation_offload import HostInputs
from lightning_shard.engines.memory_breakdown import module_tensors
from lightning_shard.engines.transforms import (
    Checkpointing,
    checkpoint_forward,
    is_kept,
)
from lightning_shard.meters.memory_account import StepMeter
from lightning_shard.precision.casting import install_casts
from tests.groups import sampled

aten = torch.ops.aten
WIDTH, BATCH, TIME = 16, 2, 8


class Block(nn.Module):
    """A transformer's block whose attention drops nothing out, and whose layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + F.dropout(F.gelu(self.out(F.dropout(mixed, 0.1).transpose(1, 2).flatten(2))), 0.1)


class Operators(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run(spec: Checkpointing, block: nn.Module | None = None) -> tuple[list[Tensor], Counter[str], int]:
    """Gradients, the operators of backward, and the bytes of activations as they are measured."""
    torch.manual_seed(0)
    block = block or Block()
    x = torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
    undo = checkpoint_forward(block, spec) if spec is not None else lambda: None
    meter = StepMeter(block, lambda: module_tensors(block, [], device=x.device), device=x.device)
    meter.watch_forward()
    loss = block(x).square().sum()
    meter.count_saved()
    with Operators() as operators:
        loss.backward()
    undo()
    assert transforms.SAVED_OBSERVERS == []
    return [x.grad, *(p.grad for p in block.parameters())], operators.ran, meter.count_resident().device.activations  # type: ignore[list-item]


def test_products_are_kept_and_measured_and_all_else_runs_again() -> None:
    plain, units, kept = run(None), run("units"), run("selective")
    for found in (units, kept):
        assert all(torch.equal(a, b) for a, b in zip(found[0], plain[0], strict=True))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    products = ("addmm", "mm", attention)
    assert {name: units[1][name] - plain[1][name] for name in products} == {"addmm": 1, "mm": 1, attention: 1}
    assert {name: kept[1][name] - plain[1][name] for name in products} == {"addmm": 0, "mm": 0, attention: 0}
    for name in ("native_layer_norm", "gelu", "bernoulli_"):
        assert (plain[1][name], kept[1][name]) == (0, units[1][name]), name
        assert kept[1][name] > 0
    x = 4 * BATCH * TIME * WIDTH
    logsumexp = 4 * BATCH * 2 * TIME
    # The results of the three products and of attention. `units` has the block's input alone.
    assert kept[2] - units[2] == 3 * x + x + x + logsumexp
    assert units[2] < kept[2] < plain[2]


def test_attention_that_drops_out_runs_again() -> None:
    """Else what comes after it would draw other random numbers in backward than in forward."""
    flash = aten._scaled_dot_product_flash_attention.default
    efficient = aten._scaled_dot_product_efficient_attention.default
    q = k = v = torch.empty(1, 1, 1, 8, device="meta")
    assert is_kept(flash, (q, k, v))
    assert is_kept(flash, (q, k, v, 0.0, True))
    assert not is_kept(flash, (q, k, v, 0.1, True))
    assert is_kept(efficient, (q, k, v, None, True))
    assert not is_kept(efficient, (q, k, v, None, True, 0.1))
    assert not is_kept(efficient, (q, k, v, None, True), {"dropout_p": 0.1})
    assert is_kept(aten.convolution.default)
    assert not is_kept(aten.gelu.default)


@pytest.mark.matrix
@pytest.mark.parametrize("spec", sampled([None, "units", "selective"], 2))
def test_a_unit_is_one_graph_whatever_is_cast_and_checkpointed(spec: Checkpointing) -> None:
    """The casts of a 16-bit precision are hooks on each module: compiled with them, and without a break."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    root = nn.Sequential(*(Block() for _ in range(10))).bfloat16()
    undo = install_casts(root, torch.bfloat16)
    for block in root:
        if spec is not None:
            checkpoint_forward(block, spec)
        block.forward = torch.compile(block.forward, backend="aot_eager")
    root(torch.randn(BATCH, TIME, WIDTH, requires_grad=True)).float().sum().backward()
    undo()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Copies(HostInputs):
    """Takes a CPU's memory for a device's, and says how much of it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        self._live: WeakSet[Any] = WeakSet()

    def on_host(self, tensor: Tensor) -> Tensor:
        self._live.add(tensor.untyped_storage())
        self.held.append(len(self._live))
        return torch.empty_like(tensor)

    def on_device(self, host: Tensor) -> Tensor:
        return torch.empty_like(host)

    def copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source)


def _recomputed(inputs: HostInputs | None, block: type[nn.Module] = Block) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(block() for _ in range(4)))
    for each in blocks if inputs is not None else ():
        checkpoint_forward(each, "offload", inputs)
    x = torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
    for _ in range(2):  # of two graphs at once the inputs of each come back in its own backward
        loss = blocks(x * 2).square().mean() + blocks(x * 3).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    return [each.grad for each in (x, *blocks.parameters()) if each.grad is not None]


def test_inputs_leave_the_device_and_come_back_as_they_were() -> None:
    inputs, expected = Copies(), _recomputed(None)
    found = _recomputed(inputs)
    assert len(found) == len(expected) == 1 + 5 * 4
    assert all(map(torch.equal, found, expected))
    assert len(inputs.held) == 16
    # That of the running module, the one before it until its copy is made, and the first, which the caller holds.
    assert max(inputs.held) == 3


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x))


def test_an_input_that_is_changed_in_place_is_told_of() -> None:
    with pytest.raises(RuntimeError, match="took was changed in place since"):
        _recomputed(Copies(), InPlace)
