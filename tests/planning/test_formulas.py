"""Predicted bytes and traffic against formulas written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shard.engines.memory_model import DeepSpeedFacts, EngineFacts, FSDPFacts, TorchDDPFacts
from lightning_shard.memory import KindBytes, MemoryAccount, most
from lightning_shard.planning.fsdp_memory import padding_note
from lightning_shard.planning.model_facts import ModelFacts, OptimizerFacts, Training
from lightning_shard.planning.predict import collectives, start_points, step_memory, step_points
from lightning_shard.planning.traffic import Nodes
from lightning_shard.tensors import fake
from lightning_shard.text import show_bytes
from tests.planning.support import BF16, FP32, model


def largest(training: Training, engine: EngineFacts) -> MemoryAccount:
    """Each kind where there is most of it, without activations."""
    return most(*(point.account for point in step_points(training, engine, None)))


def test_bytes_of_the_zero_paper() -> None:
    """Of P parameters with Adam in mixed precision (arXiv 1910.02054, figure 1): 2P + 2P + 12P, cut by stage; here
    gradients are kept in fp32.
    """
    one = model(1000)
    count, ranks = 10_000, 10
    for stage, parameters, gradients, rest in [(1, 1, 1, ranks), (2, 1, ranks, ranks), (3, ranks, ranks, ranks)]:
        device = step_memory(Training(model=one, policy=BF16), DeepSpeedFacts(ranks=ranks, stage=stage)).step.device
        assert device.parameters == 2 * count // parameters
        assert device.gradients == 4 * count // gradients
        assert device.masters == 4 * count // rest
        assert device.optimizer == 8 * count // rest + 4


def test_padding_of_uneven_cuts() -> None:
    def device(engine: EngineFacts) -> KindBytes:
        return step_memory(Training(model=model(7), policy=FP32), engine).step.device

    # 7 rows over 4 ranks are 2, 2, 2 and 1, and all are padded to 2.
    assert device(FSDPFacts(replicate=1, shard=4)).parameters == 2 * 10 * 4
    # Of 16 ranks 9 have a row of nothing.
    assert device(FSDPFacts(replicate=1, shard=16)).parameters == 10 * 4
    # ZeRO-3 cuts 70 elements into pieces of 18.
    assert device(DeepSpeedFacts(ranks=4, stage=3)).parameters == 18 * 4
    # ZeRO-1 and -2 pad the whole to twice the ranks.
    assert device(DeepSpeedFacts(ranks=4, stage=2)).masters == 18 * 4


def test_units_with_settings_of_their_own() -> None:
    plain, engine = model(100, 50, 50, 50, units=3), FSDPFacts(replicate=1, shard=2)
    root, first, *others = plain.parameters
    stays, wide = replace(first, reshard=False), replace(first, compute=torch.float32)
    kinds = {
        name: Training(model=ModelFacts(parameters=(root, one, *others)), policy=BF16)
        for name, one in (("plain", first), ("stays", stays), ("wide", wide))
    }
    gathered = {name: largest(training, engine).device.gathered for name, training in kinds.items()}
    assert gathered == {"plain": 2 * 1500, "stays": 2 * 1500 + 2 * 500, "wide": 2 * 1000 + 4 * 500}
    sent = collectives(kinds["stays"], engine)
    assert next(c.payload for c in sent if c.what == "parameters, backward") == 2 * 1000


def test_traffic_of_hybrid_sharding() -> None:
    nodes = Nodes(nodes=2, devices=4)
    sent = {
        c.axis + " " + c.what: c
        for c in collectives(Training(model=model(800), policy=BF16), FSDPFacts(replicate=2, shard=4))
    }
    # The root is gathered once in a step: all its rows in bf16, inside the node alone.
    gathered = sent["shard parameters, forward"]
    assert (gathered.inside(nodes), gathered.between(nodes)) == (3 / 4 * 16_000, 0)
    # Each of a node's four devices all-reduces its quarter with one other node: fp32.
    shards = sent["replicate gradient shards"]
    assert (shards.inside(nodes), shards.between(nodes)) == (0, 4 * 2 * 1 / 2 * 8_000)


@pytest.mark.parametrize(("rows", "ranks", "padded", "fewer"), [(64, 8, 64, 8), (64, 96, 96, 32), (10, 4, 12, 2)])
def test_padding_of_dim_0(rows: int, ranks: int, padded: int, fewer: int) -> None:
    """As FSDP2 pads; the proposed mesh pads at most a tenth."""
    with fake.fake_world(ranks):
        module = nn.Linear(10, rows, bias=False)
        fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
        group = module._get_fsdp_state()._fsdp_param_group
        assert ranks * group.fsdp_params[0].padded_sharded_param_size[0] == padded
    training, engine = Training(model=model(rows), policy=FP32), FSDPFacts(replicate=1, shard=ranks)
    note = padding_note(training, engine)
    assert bool(note) == (padded > 1.1 * rows)
    assert not note or f"take {show_bytes(padded * 40)} in place of {show_bytes(rows * 40)}." in note
    assert not note or f"mesh: {{replicate: {ranks // fewer}, shard: {fewer}}}" in note


def test_start_of_a_fit_and_a_save() -> None:
    training = Training(model=model(4, 8, 16, units=2), policy=BF16)
    engine = FSDPFacts(replicate=1, shard=4)
    # A quarter in fp32, and the largest unit whole.
    (start,) = start_points(training, engine)
    assert start.account.device == KindBytes(parameters=28 * 10, gathered=16 * 40)
    assert start_points(training, TorchDDPFacts(ranks=4)) == []
    # Loaded in fp32 and cast to bf16 on the device.
    (start,) = start_points(training, DeepSpeedFacts(ranks=4, stage=2))
    assert start.account.device == KindBytes(parameters=28 * 20, gathered=28 * 20)
    assert start_points(training, DeepSpeedFacts(ranks=4, stage=3)) == []
    assert start_points(replace(training, policy=FP32), DeepSpeedFacts(ranks=4, stage=2)) == []
    # Masters, and two slots with a step count for each tensor.
    assert training.saved == 28 * 40 * 3 + 3 * 4


@pytest.mark.parametrize(("frozen", "outside"), [(True, False), (False, True)])
def test_a_step_allocates_for_what_the_optimizer_has(*, frozen: bool, outside: bool) -> None:
    # Of 1,500 rows of 10 the optimizer has 500; foreach's AdamW allocates as many bytes as it steps.
    known = model(1000, 500)
    first = replace(known.parameters[0], trainable=not frozen, group=None if outside else 0)
    training = Training(
        model=ModelFacts(parameters=(first, known.parameters[1])), policy=FP32, optimizer=OptimizerFacts(temporary=1.0)
    )
    for engine, ranks in ((TorchDDPFacts(ranks=2), 1), (FSDPFacts(replicate=1, shard=2), 2)):
        last = step_points(training, engine, None)[-1]
        assert last.account.device.optimizer == 3 * 4 * 5000 // ranks + 4
        assert last.account.device.gradients == 4 * (5000 if frozen else 15_000) // ranks
        assert training.saved == 4 * (15_000 + 2 * 5000) + 4
