"""Traces of a step on a fake world: what they keep, what they find, and what can't be traced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_shard.engines.memory_model import TorchDDPFacts
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.engines.units import find_units
from lightning_shard.planning.memory_trace import Step, Trace, TraceError, trace_step
from lightning_shard.planning.model_facts import Training, model_facts
from lightning_shard.planning.planner import MOST_TRACES, Run, confirmed_batch, largest_batch
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.tensors import fake
from tests.models import TinyLM, loader
from tests.planning.support import BF16, FP32


def trace(module: pl.LightningModule, *, mode: Any = None, checkpointing: Checkpointing = None, **kwargs: Any) -> Any:
    mode = mode or fake.fake_mode()
    fake.make_fake(module, mode)
    module.__dict__["log"] = lambda *args, **kwargs: None
    units = find_units(module, "auto")
    step = Step(training_step=lambda b: module.training_step(b, 0), batch=next(iter(loader())), units=units)
    step = replace(step, checkpointing=checkpointing)
    return trace_step(module, step, BF16, mode, **kwargs)


def test_a_trace_leaves_the_module_as_it_was() -> None:
    module = TinyLM(tie=True)
    module.configure_model()
    before = {name: (p.dtype, p.shape) for name, p in module.named_parameters()}
    found = trace(module)
    assert {name: (p.dtype, p.shape) for name, p in module.named_parameters()} == before
    assert module.head.weight is module.embed.weight
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_pre_hooks or "forward" in vars(m) for m in module.modules())
    assert found.order == ("blocks.0", "blocks.1", "blocks.2")
    # All but the loss and the batch is freed.
    assert found.segments[-1].end_activations < 1000


def test_inputs_on_the_host_are_not_on_the_device() -> None:
    module = TinyLM(depth=6)
    module.configure_model()
    mode = fake.fake_mode()
    kept, offloaded = (trace(module, mode=mode, checkpointing=form, batch_size=32) for form in ("units", "offload"))
    size = max(s.offloaded for s in offloaded.segments) // 6
    assert size == 32 * 8 * 12 * 2
    forward = [[s for s in each.segments if s.phase == "forward"][-1] for each in (kept, offloaded)]
    # The last one's is on the device too, and the loop of the module holds none.
    assert forward[0].end_activations - forward[1].end_activations == 5 * size
    assert max(s.activations for s in kept.segments) >= max(s.activations for s in offloaded.segments) + 2 * size
    assert {s.offloaded for s in kept.segments} == {offloaded.segments[-1].offloaded} == {0}


def run_of(module: nn.Module, *traces: Trace) -> Run:
    facts = model_facts(module, units=find_units(module, "auto"))
    return Run(training=Training(model=facts, policy=FP32), engine=TorchDDPFacts(ranks=1), traces=traces)


def test_the_largest_batch_is_confirmed_by_its_own_trace() -> None:
    module = TinyLM()
    module.configure_model()
    mode = fake.fake_mode()
    # Without events there are no blocks of the allocator.
    run = run_of(module, *(replace(trace(module, mode=mode, batch_size=size), events=()) for size in (4, 8)))
    sizes: list[int] = []

    def steep(batch: int) -> Trace:
        """Twice what the line through the two small batches says."""
        sizes.append(batch)
        found = run.at(batch)
        doubled = [replace(s, activations=2 * s.activations, peak=2 * s.peak) for s in found.segments]
        return replace(found, segments=tuple(doubled))

    memory = run.needs.at(run.tensors(100))[1]
    largest = largest_batch(run, memory)
    # Without a CUDA context of the larger kind there is room for thousands.
    assert largest is not None
    assert largest[0] == 100 < largest[1]
    batch, may = confirmed_batch(run, memory, steep) or (0, 0)
    assert batch < may
    assert 45 <= batch <= 50
    assert {batch, batch * 5 // 4} <= {*sizes}
    assert len(sizes) <= MOST_TRACES
    # Where the line is right, one look is enough.
    sizes.clear()
    assert confirmed_batch(run, memory, lambda batch: sizes.append(batch) or run.at(batch)) == largest  # type: ignore[func-returns-value]
    assert sorted(sizes) == [100, 125]


class Experts(TinyLM):
    """With products of two experts at once."""

    def configure_model(self) -> None:
        super().configure_model()
        self.experts = nn.Parameter(torch.zeros(2, self.width, self.width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        ends = torch.tensor([x[..., 0].numel() // 2, x[..., 0].numel()], dtype=torch.int32)
        return self.head(functional.grouped_mm(x.flatten(0, 1), self.experts, offs=ends).view_as(x))


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
def test_products_of_experts_are_traced_in_every_dtype(policy: PrecisionPolicy) -> None:
    module, mode = Experts(width=16), fake.fake_mode()
    module.configure_model()
    fake.make_fake(module, mode)
    module.__dict__["log"] = lambda *args, **kwargs: None
    step = Step(training_step=lambda b: module.loss(b), batch=next(iter(loader())))
    assert trace_step(module, step, policy, mode).batch_size == 4


class Peculiar(pl.LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].float()
        if self.how == "size":
            x = x[: int(batch[0].sum())]
        elif self.how == "mask":
            x = x[batch[0] > 3]
        elif self.how == "kernel":
            x = _kernel(x)
        return self.layer(x).sum()


@torch.library.custom_op("plan_tests::kernel", mutates_args=())
def _kernel(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("how", "operation"),
    [
        ("size", "_local_scalar_dense"),
        ("mask", "nonzero|index"),
        ("kernel", "plan_tests.kernel"),
    ],
)
def test_what_can_not_be_traced_is_named(how: str, operation: str) -> None:
    with pytest.raises(TraceError, match=rf"operation \S*({operation}).*test_trace\.py:\d+"):
        trace(Peculiar(how))
