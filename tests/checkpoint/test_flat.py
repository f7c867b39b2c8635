"""Flat partitions as ZeRO keeps them, full parameters and DTensors: one checkpoint, read by each from each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.checkpoint.files.manifest import read_manifest
from lightning_shard.engines.torch_ddp import DDPOptions, TorchDDP
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.strategies.ddp import ShardDDPStrategy
from lightning_shard.tensors.flat import FlatGroup, FlatMember, FlatOptimizer, FlatSlice, FlatTensor, torch_optimizer
from lightning_shard.tensors.names import fqns
from tests.checkpoint.calls import load_module, trainer_state
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.flat import FORMS, Run, build, padding
from tests.checkpoint.flat_runs import load_run, save_run
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters

BEFORE, AFTER = 3, 2
WRITERS = [("whole", 1), *((form, 2) for form in FORMS), *((form, 3) for form in FORMS if form != "whole")]


def save_trained(forms: list[str], folder: str) -> None:
    for form in forms:
        save_run(build(form, 0).step(BEFORE), f"{folder}/{form} {dist.get_world_size()}.ckpt")


def uninterrupted() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = build("whole", 0).step(BEFORE)
    return run.values(), run.step(AFTER).values()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the checkpoint of each writer, and what they must all hold, before and after more steps."""
    folder = tmp_path_factory.mktemp("flat")
    for ranks in (1, 2, 3):
        run_distributed(save_trained, ranks, [form for form, size in WRITERS if size == ranks], str(folder))
    return folder, *run_distributed(uninterrupted, 1)[0]


@pytest.mark.parametrize(("form", "ranks"), WRITERS)
def test_every_form_and_number_of_ranks_writes_the_same(written, form, ranks):
    folder, before, _ = written
    assert {key.rpartition(".")[2] for key in before if key.startswith("optimizer.0.body.bias")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    }
    assert before["optimizer.0.scale.step"].dtype == torch.float32
    path = f"{folder}/{form} {ranks}.ckpt"
    assert_equal(stored(path), before)
    manifest, state = read_manifest(path), trainer_state(path)
    assert manifest.aliases == {"model.head.weight": "model.embed.weight"}
    first = f"{folder}/whole 1.ckpt"
    assert manifest.tensors == read_manifest(first).tensors
    assert state["optimizer_states"] == trainer_state(first)["optimizer_states"]
    assert state["optimizer_states"][0]["groups"][0]["params"] == [
        "embed.weight",
        "body.weight",
        "frozen",
        "kernel",
        "row",
    ]


def live_slots(run: Run) -> dict[tuple[int, str], Tensor]:
    state = torch_optimizer(run.optimizer).state
    return {(id(stepped), slot): value for stepped, slots in state.items() for slot, value in slots.items()}


def load_each(form: str, folder: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]]:
    """From every checkpoint into a run of another seed that has state of its own, and some steps more."""
    results = []
    for writer, ranks in WRITERS:
        run = build(form, 1, lr=0.5).step(1)
        slots = live_slots(run)
        for value in slots.values():
            value.detach().fill_(torch.nan)  # padding too
        report = load_run(run, f"{folder}/{writer} {ranks}.ckpt")
        assert (report.missing, report.unexpected) == ((), ())
        now = live_slots(run)
        run.steps = BEFORE
        loaded = run.values()
        facts = {
            "in place": slots.keys() == now.keys() and all(slots[key] is now[key] for key in slots),
            "padding": bool(padding(run).any()) if run.masters else False,
        }
        results.append((loaded, run.step(AFTER).values(), facts))
    return results


@pytest.mark.parametrize("form", sampled(FORMS, FORMS.index("stage 1"), FORMS.index("dtensor")))
@pytest.mark.parametrize("ranks", sampled([1, 2, 3], 2))
def test_each_form_goes_on_bitwise_from_each(written, form, ranks):
    folder, before, after = written
    for results in run_distributed(load_each, ranks, form, str(folder)):
        assert len(results) == len(WRITERS)
        for writer, (loaded, stepped, facts) in zip(WRITERS, results, strict=True):
            assert_equal(loaded, before, writer)
            assert_equal(stepped, after, writer)
            assert facts == {"in place": True, "padding": False}, writer


def load_fresh(form: str, path: str) -> dict[str, Tensor]:
    run = build(form, 1, lr=0.5)
    load_run(run, path)
    run.steps = BEFORE
    return run.step(AFTER).values()


@pytest.mark.parametrize("form", ["stage 1", "stage 3"])
def test_slots_are_made_where_there_are_none(written, form):
    folder, _, after = written
    for values in run_distributed(load_fresh, 2, form, f"{folder}/dtensor 3.ckpt"):
        assert_equal(values, after)


def bf16_there_and_back(folder: str) -> list[dict[str, Tensor]]:
    """fp32 whole -> bf16 flat partitions -> fp32 flat partitions."""
    low = build("stage 3", 1, dtype=torch.bfloat16).step(1)
    load_run(low, f"{folder}/whole 1.ckpt")
    low_values = low.values()
    save_run(low, f"{folder}/low.ckpt")
    back = build("stage 1", 2)
    load_run(back, f"{folder}/low.ckpt")
    return [low_values, back.values()]


def test_state_follows_its_parameters_to_another_dtype(written):
    folder, before, _ = written
    for low, back in run_distributed(bf16_there_and_back, 2, str(folder)):
        for key, tensor in before.items():
            rounds = tensor.is_floating_point() and not key.endswith(".step")
            assert low[key].dtype == (torch.bfloat16 if rounds else tensor.dtype), key
            assert back[key].dtype == tensor.dtype, key
            expected = tensor.to(torch.bfloat16) if rounds else tensor
            assert torch.equal(low[key], expected), key
            assert torch.equal(back[key], expected.to(tensor.dtype)), key


def counts_in_numbers(folder: str) -> dict[str, Any]:
    """An optimizer that counts its steps in an int, as DeepSpeed's own for the CPU do."""
    run = build("stage 1", 0).step(BEFORE)
    states = torch_optimizer(run.optimizer).state
    for state in states.values():
        state["step"] = int(state["step"])
    save_run(run, f"{folder}/numbers.ckpt")
    for state in states.values():
        state["step"] = 0
    load_run(run, f"{folder}/whole 1.ckpt")
    counts = [state["step"] for state in states.values()]
    fresh = build("stage 3", 1)
    load_run(fresh, f"{folder}/numbers.ckpt")
    fresh.steps = BEFORE
    return {"counts": counts, "values": fresh.step(AFTER).values()}


def test_a_step_count_is_a_scalar_in_the_checkpoint_and_a_number_where_it_was_one(written):
    folder, before, after = written
    for result in run_distributed(counts_in_numbers, 2, str(folder)):
        assert result["counts"] == [BEFORE, BEFORE]
        assert all(type(count) is int for count in result["counts"])
        assert_equal(result["values"], after)
    assert_equal(stored(f"{folder}/numbers.ckpt"), before)
    assert trainer_state(f"{folder}/numbers.ckpt")["optimizer_states"][0]["slots"] == {}


def tied_by_its_other_name(path: str) -> dict[str, Tensor]:
    run = build("stage 1", 0).step(1)
    run.masters["head.weight"] = run.masters.pop("embed.weight")
    save_run(run, path)
    other = build("stage 3", 1)
    other.masters["head.weight"] = other.masters.pop("embed.weight")
    load_run(other, path)
    return other.values()


def test_a_tied_parameter_goes_by_any_of_its_names(tmp_path):
    path = str(tmp_path / "a.ckpt")
    values = run_distributed(tied_by_its_other_name, 2, path)
    assert read_manifest(path).aliases == {"model.head.weight": "model.embed.weight"}
    assert_equal(values[0], stored(path))


def weights_only(path: str) -> tuple[Tensor, dict[str, Tensor], bool]:
    run = build("stage 1", 1).step(1)
    state = torch_optimizer(run.optimizer).state[run.flats()[0].flat]["exp_avg"].clone()
    own = run.net.body.weight.clone()
    load_module(path, module=run.net, masters=run.masters)
    kept = torch.equal(state, torch_optimizer(run.optimizer).state[run.flats()[0].flat]["exp_avg"])
    return run.net.body.weight - own, run.values(), kept


def test_weights_alone_go_to_the_masters_and_not_to_the_copies_of_the_module(written):
    folder, before, _ = written
    for change, values, kept in run_distributed(weights_only, 2, f"{folder}/stage 3 3.ckpt"):
        assert not change.any()
        assert kept
        models = {key for key in before if key.startswith("model.")}
        assert_equal({key: values[key] for key in models}, {key: before[key] for key in models})


class Vectors(TinyLM):
    """Steps its vectors alone, which are flat tensors as they are."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad and p.ndim == 1], lr=self.lr)


class FlatHead(TorchDDP):
    """DDP with the checkpoint of an engine that keeps a rank's rows of the head in flat memory."""

    rows: Tensor
    flattened: int = 0
    """How often the optimizer's state was asked for."""

    def reshard_and_sync_masters(self) -> None:
        super().reshard_and_sync_masters()
        self.rows = self.my_rows().flatten().clone()

    def my_rows(self) -> Tensor:
        weight = self._module.head.weight.detach()
        return weight[: len(weight) // 2] if dist.get_rank() == 0 else weight[len(weight) // 2 :]

    def refresh_model_weights(self) -> None:
        weight = self._module.head.weight.detach()
        self.my_rows().copy_(self.rows.view_as(self.my_rows()))
        for rank, rows in enumerate((weight[: len(weight) // 2], weight[len(weight) // 2 :])):
            dist.broadcast(rows, rank)

    def masters(self) -> dict[str, FlatTensor]:
        weight = self._module.head.weight
        start = weight.shape[1] * (weight.shape[0] // 2) * dist.get_rank()
        return {"head.weight": FlatTensor(weight.shape, weight.dtype, [FlatSlice(self.rows, start)])}

    def optimizers(self) -> list[FlatOptimizer]:
        self.flattened += 1
        optimizer, names = self._optimizers[0], fqns(self._module)
        group = optimizer.param_groups[0]
        groups = [
            FlatGroup(
                flat=flat,
                members=(FlatMember(fqn=names.of(flat), shape=flat.shape, length=len(flat)),),
                group=group,
            )
            for flat in group["params"]
        ]
        return [FlatOptimizer(optimizer=optimizer, groups=groups)]


class PartlyFlat(ShardDDPStrategy):
    def engine_for(self, module: nn.Module | None = None) -> FlatHead:
        return FlatHead(DDPOptions(), ForwardOptions(), at_boundary=True)


def fit(strategy: type[ShardDDPStrategy], steps: int, save_to: str, resume: str | None) -> dict[str, Tensor]:
    module = Vectors(seed=7 if resume is None else 8)
    trainer = quiet_trainer(strategy=strategy(), max_steps=steps)
    trainer.fit(module, loader(), ckpt_path=resume)
    trainer.save_checkpoint(save_to)
    if strategy is PartlyFlat:
        assert trainer.strategy.engine.flattened > 0
    return whole_parameters(module)


@pytest.mark.matrix
def test_a_strategy_says_what_its_flat_memory_stands_for(tmp_path):
    ends = {}
    for writer, reader in ((ShardDDPStrategy, PartlyFlat), (PartlyFlat, ShardDDPStrategy)):
        first, last = str(tmp_path / f"{writer.__name__}.ckpt"), str(tmp_path / f"{writer.__name__} end.ckpt")
        run_distributed(fit, 2, writer, 2, first, None)
        ends[writer] = run_distributed(fit, 2, reader, 4, last, first)
        assert_equal(ends[writer][0], ends[writer][1])
    assert_equal(stored(f"{tmp_path}/PartlyFlat.ckpt"), stored(f"{tmp_path}/ShardDDPStrategy.ckpt"))
    whole_run = run_distributed(fit, 2, ShardDDPStrategy, 4, str(tmp_path / "whole.ckpt"), None)
    for end in ends.values():
        assert_equal(end[0], whole_run[0])
    assert_equal(stored(f"{tmp_path}/PartlyFlat end.ckpt"), stored(f"{tmp_path}/whole.ckpt"))


@pytest.mark.parametrize(
    "member",
    [
        {"offset": 3, "length": 2},
        {"start": 5, "length": 2},
        {"offset": -1, "length": 1},
        {"length": 1, "stepped": False},
    ],
)
def test_a_member_lies_inside_its_parameter_and_the_flat_tensor(member):
    with pytest.raises(AssertionError, match="FlatMember"):
        FlatGroup(flat=torch.zeros(4), members=(FlatMember(fqn="w", shape=(2, 3), **member),), group={})


def test_flat_groups_are_flat_and_name_a_parameter_once():
    member = FlatMember(fqn="w", shape=(2,))
    with pytest.raises(AssertionError, match="one dimension"):
        FlatGroup(flat=torch.zeros(2, 2), members=(), group={})
    with pytest.raises(AssertionError, match="twice"):
        FlatGroup(flat=torch.zeros(2), members=(member, member), group={})
