"""Models on the meta device get the same values on every engine, mesh and world size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_shard.engines.materialize import Materializer, derived_seed
from lightning_shard.errors import MaterializationError
from lightning_shard.mesh import build_mesh
from tests.engines.meta_models import (
    CPU,
    SEED,
    Angles,
    Block,
    Root,
    engine_of,
    replicated,
    run_on,
    sharded,
    tied_llama,
    values,
)
from tests.harness import run_distributed


def _on_every_engine(make: Callable[[], nn.Module], unit_specs: list[Any]) -> dict[str, dict[str, Tensor]]:
    world = dist.get_world_size()
    found = {
        "ddp": replicated(make),
        "replicate": sharded(make, (world, 1), precision="bf16-mixed", replicate_only=True),
        "offload": sharded(make, (1, world), cpu_offload=True),
        "children": sharded(make, (1, world), units=[]),
    }
    for units in unit_specs:
        found[f"full {units}"] = sharded(make, (1, world), units=units)
        if world == 4:
            found[f"hybrid {units}"] = sharded(make, (2, 2), units=units)
    return found


UNITS: list[Any] = ["auto", ["Linear", "MultiheadAttention"], ["Block", "Model"], 30, 1]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("make", "units"),
    [(Root, UNITS), (tied_llama, ["auto", ["LlamaMLP", "Linear"], 90])],
    ids=["all", "llama"],
)
def test_the_same_values_on_every_engine_mesh_and_world_size(make: Callable[[], nn.Module], units: list[Any]) -> None:
    reference = run_distributed(_on_every_engine, 1, make, units[:1])[0]["ddp"]
    assert not any(t.is_meta for t in reference.values())
    assert not any(t.isnan().any() for t in reference.values())
    for world in (2, 4):
        for by_engine in run_distributed(_on_every_engine, world, make, units):
            assert len(by_engine) == 4 + len(units) * (1 if world == 2 else 2)
            for engine, found in by_engine.items():
                assert found.keys() == reference.keys()
                wrong = [n for n, tensor in found.items() if not torch.equal(tensor, reference[n])]
                assert not wrong, f"{engine} on {world} processes"
    if make is Root:
        _check_values(reference)
    else:
        _check_llama(reference)


def _check_values(found: dict[str, Tensor]) -> None:
    torch.manual_seed(derived_seed(SEED, "model.conv"))
    made = nn.Conv1d(6, 3, 2)  # A constructor after the module's own seed.
    assert all(torch.equal(found[f"model.conv.{name}"], tensor) for name, tensor in made.named_parameters())
    assert torch.equal(found["model.head.weight"], found["model.embed.weight"])
    for block in ("model.blocks.0", "model.blocks.1"):
        assert torch.equal(found[f"{block}.again.weight"], found[f"{block}.up.weight"])
        assert torch.equal(found[f"{block}.norm.running_var"], torch.ones(6))
    assert not torch.equal(found["model.blocks.0.up.weight"], found["model.blocks.1.up.weight"])
    assert all(torch.equal(found[f"model.angles.{name}"], tensor) for name, tensor in Angles().named_buffers())
    assert torch.equal(found["gain"], torch.full((3,), 0.25))


def _check_llama(found: dict[str, Tensor]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    built = dict(LlamaRotaryEmbedding(tied_llama().model.config).named_buffers())
    assert all(torch.equal(found[f"model.model.rotary_emb.{name}"], tensor) for name, tensor in built.items())
    assert torch.equal(found["model.model.norm.weight"], torch.ones(8))
    assert torch.equal(found["model.lm_head.weight"], found["model.model.embed_tokens.weight"])


# What can't be done is said before anything is touched.


class Bare(nn.Module):
    """Has a parameter and nothing to give it values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class Forgets(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(3))
        self.register_buffer("position", torch.empty(3, dtype=torch.int64), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)


def holding(**children: Callable[[], nn.Module]) -> nn.Module:
    root = nn.Module()
    with torch.device("meta"):
        for name, make in children.items():
            root.add_module(name, make())
    return root


def fill(root: nn.Module) -> None:
    Materializer(root, device=CPU, seed=SEED).fill(root.modules())


def test_modules_without_an_initialisation_are_named() -> None:
    root = holding(good=lambda: nn.Linear(2, 2), bad=Bare, list=lambda: nn.ModuleList([Bare()]))
    with pytest.raises(MaterializationError, match=r"2 of its modules.*bad \(Bare\), list\.0 \(Bare\).*reset_parame"):
        fill(root)
    assert all(p.is_meta for p in root.parameters())
    with pytest.raises(MaterializationError, match=r"forgets \(Forgets\) left weight, position without values"):
        fill(holding(forgets=Forgets))


def test_values_that_are_there_stay() -> None:
    root = holding(embed=lambda: nn.Embedding(5, 3), tied=lambda: nn.Linear(3, 5), part=lambda: nn.Linear(3, 5))
    root.tied.weight = root.embed.weight
    root.part.weight = nn.Parameter(torch.full((5, 3), 2.0))
    root.bare = Bare()  # On a real device it needs no initialisation.
    root.bare.weight.data.fill_(3.0)
    fill(root)
    assert torch.equal(root.bare.weight, torch.full((3,), 3.0))
    alone = holding(embed=lambda: nn.Embedding(5, 3))
    fill(alone)
    assert root.tied.weight is root.embed.weight
    assert torch.equal(root.embed.weight, alone.embed.weight)
    assert torch.equal(root.part.weight, torch.full((5, 3), 2.0))
    assert not root.part.bias.isnan().any()


class InitialisesOthers(nn.Module):
    """As nanoGPT: one method for linear layers, and what it does not know keeps its constructor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 40)
        self.norm = nn.LayerNorm(3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=9.0)


def test_the_enclosing_models_initialisation_comes_on_top_of_the_modules_own() -> None:
    root = holding(outside=lambda: nn.Linear(40, 40), model=InitialisesOthers)
    fill(root)
    # 1600 values: the deviation is known to a few percent. nn.Linear's own is below 1 / sqrt(40).
    assert 8 < root.model.linear.weight.std() < 10
    assert root.model.linear.bias.abs().max() < 1
    assert torch.equal(root.model.norm.weight, torch.ones(3))
    assert root.outside.weight.std() < 1


def _sharded_by_the_user() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    root: Any = Root()
    mesh = build_mesh((1, 2), device_type="cpu")
    for block in root.model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    assert isinstance(root.model.blocks[0].down.weight, DTensor)
    engine_of().prepare(root, replace(run_on((1, 2)), mesh=mesh))
    assert root.model.blocks[0].down.weight.to_local().shape == (3, 13)
    return values(root), replicated(Root)


def _rank_0_wins() -> list[dict[str, Tensor]]:
    def make() -> nn.Module:
        torch.manual_seed(dist.get_rank())
        root = nn.Module()
        root.block = Block()
        root.angles = Angles()
        # Not contiguous, as weights in channels_last are.
        root.image = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        root.angles.angles.add_(dist.get_rank())
        root.angles.mask.logical_xor_(torch.tensor(dist.get_rank() == 1))
        root.angles.turns.mul_(1 + dist.get_rank())
        return root

    built = values(make())
    everything = [built, replicated(make), sharded(make, (1, 2)), sharded(make, (1, 2), units=["Block"])]
    return [*everything, sharded(make, (2, 1), replicate_only=True)]


def _both() -> tuple[tuple[dict[str, Tensor], dict[str, Tensor]], list[dict[str, Tensor]]]:
    return _sharded_by_the_user(), _rank_0_wins()


def test_a_tree_that_the_user_sharded_and_ranks_that_built_different_values() -> None:
    (one, first), (other, second) = run_distributed(_both, 2)
    for found, expected in (one, other):
        assert found.keys() == expected.keys()
        assert not [n for n in found if not torch.equal(found[n], expected[n])]
    assert not torch.equal(first[0]["block.up.weight"], second[0]["block.up.weight"])
    for found in [*first[1:], *second[1:]]:
        assert not [n for n in found if not torch.equal(found[n], first[0][n])], "ranks have rank 0's"
