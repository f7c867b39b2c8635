"""Model FLOPs against formulas written by hand, on models of every device, and what counting leaves behind: nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT
from lightning_shard.meters.flops import FlopCount, count_flops
from lightning_shard.meters.peaks import peak_flops

BATCH, TIME, WIDTH, HEADS, LAYERS = 3, 16, 32, 4, 2


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=LAYERS, heads=HEADS, width=WIDTH, max_length=TIME)


def _loss(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    logits = model(tokens)
    return {"loss": functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


def _by_hand() -> int:
    """Forward FLOPs of `_gpt`: two for each weight of a matrix and token, and attention over half of the pairs."""
    weights = LAYERS * 12 * WIDTH**2 + 256 * WIDTH
    attention = LAYERS * 2 * BATCH * TIME * TIME * 2 * WIDTH // 2
    return 2 * weights * BATCH * TIME + attention


def _count(function: Callable[..., object], *modules: nn.Module) -> FlopCount:
    return count_flops(lambda made, _: function(*made), nn.ModuleList(modules), None)


def test_a_transformer_counts_as_its_formula() -> None:
    count = count_flops(_loss, _gpt(), torch.zeros(BATCH, TIME, dtype=torch.int64))
    # Every product has a gradient for each of its two factors.
    assert count == FlopCount(forward=_by_hand(), backward=2 * _by_hand())
    assert count.total == 3 * _by_hand()


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        # The input needs gradients: what reentrant checkpointing asks for.
        y = checkpoint(self.attend, checkpoint(self.body, x, use_reentrant=self.reentrant), use_reentrant=False)
        assert isinstance(y, Tensor)
        return y

    def attend(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_is_recomputed_counts_once(use_reentrant: bool) -> None:
    module = _Checkpointed(use_reentrant)
    count = _count(lambda module: module(torch.zeros(2, 5, 8, requires_grad=True)), module)
    forward = 2 * 2 * 5 * (8 * 16 + 16 * 8) + 2 * 2 * 5 * 5 * 16
    assert count == FlopCount(forward=forward, backward=2 * forward)
    assert all(p.grad is None for p in module.parameters())


def _self_attention(x: Tensor, causal: bool) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if causal else None
    layer = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    mixed, _ = layer(x, x, x, attn_mask=mask, need_weights=False, is_causal=causal)
    assert isinstance(mixed, Tensor)
    return mixed


@pytest.mark.parametrize("causal", [True, False])
def test_attention_counts_alike_however_it_is_called(causal: bool) -> None:
    q, k = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8)
    pairs = 2 * 4 * 6 * 6 // (2 if causal else 1)

    def called(function: Callable[..., Tensor], **kwargs: Any) -> int:
        return _count(lambda: function(q, k, k, is_causal=causal, enable_gqa=True, **kwargs)).forward

    assert called(functional.scaled_dot_product_attention) == 2 * pairs * 16
    # Imported by its name; and with dropout, which CPUs compute with plain products.
    assert called(scaled_dot_product_attention, dropout_p=0.5) == 2 * pairs * 16
    projections = 2 * 2 * 6 * 8 * (3 * 8 + 8)
    pairs = 2 * 6 * 6 // (2 if causal else 1)
    count = _count(lambda: _self_attention(torch.zeros(2, 6, 8), causal))
    assert count.forward == projections + 2 * pairs * 16


def test_what_needs_no_gradient_has_no_backward() -> None:
    first, second = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
    count = _count(lambda first, second: second(first(torch.zeros(3, 4))), first, second)
    # The first layer has no gradients at all, and the second one's input needs none.
    assert count == FlopCount(forward=2 * 3 * (16 + 8), backward=2 * 3 * 8)
    assert _count(lambda first: first(torch.zeros(3, 4)), first).backward == 0
    with torch.no_grad():
        assert _count(lambda second: second(torch.zeros(3, 4)), second).backward == 2 * 3 * 8


def test_counting_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(32, 1))
    module(torch.randn(4, 1, 6, 6)).sum().backward()
    stepped: list[Tensor] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(stepped.append)
    x = torch.randn(4, 1, 6, 6)

    def step() -> Tensor:
        random.random()
        numpy.random.rand()
        y: Tensor = module(x.add_(torch.randn(()))).sum()
        return y

    before = copy.deepcopy((module.state_dict(), [p.grad for p in module.parameters()], x))
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert _count(lambda _: step(), module).total > 0
    after = module.state_dict(), [p.grad for p in module.parameters()], x
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]
    assert not stepped
    # And the module still trains.
    step().backward()
    assert len(stepped) == 6


@pytest.mark.matrix
def test_compiled_modules_are_counted_without_compiling_them() -> None:
    layer = torch.compile(nn.Linear(2, 3))
    assert _count(lambda layer: layer(torch.zeros(5, 2)), layer).forward == 2 * 5 * 6


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", torch.float16, 312),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.float8_e4m3fn, 1978.9),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("NVIDIA L400", torch.bfloat16, None),
        ("cpu", torch.bfloat16, None),
    ],
)
def test_peaks_by_name(name: str, dtype: torch.dtype, tflops: float | None) -> None:
    assert peak_flops(name, dtype) == (None if tflops is None else tflops * 1e12)


def test_the_peak_of_fp32_follows_torch() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops(h100, torch.float32) == 494.7e12
        assert peak_flops("Tesla T4", torch.float32) == 8.1e12
        torch.set_float32_matmul_precision("highest")
        assert peak_flops(h100, torch.float32) == 66.9e12
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
def test_an_lstm_counts_the_products_of_its_fused_kernel(layers: int, bidirectional: bool) -> None:
    module = torch.nn.LSTM(5, 7, num_layers=layers, bidirectional=bidirectional, batch_first=True)
    count = _count(lambda module: module(torch.zeros(3, 11, 5, requires_grad=True))[0], module)
    assert count.forward == 2 * 3 * 11 * sum(p.numel() for p in module.parameters() if p.ndim == 2)
    assert count.backward == 2 * count.forward
