"""The recipes: each trains, with the same numbers on each engine, and the packed one is what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml

from examples.gpt import Transformer
from examples.recipes import packed
from tests.groups import sampled
from tests.harness import ROOT, run_distributed

RECIPES = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("*.yaml"))
ENGINES = [
    "shard_ddp_aligned",
    "shard_fsdp_aligned",
    "shard_deepspeed_stage_2_aligned",
    "shard_deepspeed_stage_3_aligned",
]
SMALL = {
    "packed": {"data.init_args.limit_bytes": 20000, "data.init_args.batch_size": 2, "model.init_args.max_length": 256},
    # Each batch is two optimizer steps.
    "gan": {"data.init_args.samples": 1200, "trainer.val_check_interval": 1},
}

FIND_UNUSED = {
    "trainer.strategy": "lightning_shard.ShardDDPStrategy",
    "trainer.strategy.init_args.aligned": "true",
    "trainer.strategy.init_args.find_unused_parameters": "true",
}


def _fit(recipe: str, strategies: list[str], steps: int, folder: str) -> list[dict[str, float]]:
    from lightning_shard import ShardCLI

    found = []
    for strategy in strategies:
        changes = {
            "trainer.strategy": strategy,
            "trainer.devices": (ranks := int(os.environ["WORLD_SIZE"])),
            "trainer.max_steps": steps,
            "trainer.val_check_interval": steps,
            "trainer.limit_val_batches": 1,
            "trainer.num_sanity_val_steps": 0,
            "trainer.log_every_n_steps": 1,
            "trainer.enable_progress_bar": "false",
            "trainer.enable_model_summary": "false",
            "trainer.default_root_dir": folder,
            "trainer.logger.init_args.save_dir": folder,
            **(FIND_UNUSED if (recipe, strategy) == ("gan", "shard_ddp_aligned") else {}),
            **SMALL.get(recipe, {"data.init_args.samples": 40 * ranks, "data.init_args.num_workers": 1}),
        }
        config = str(ROOT / "examples" / "recipes" / f"{recipe}.yaml")
        trainer = ShardCLI(args=["fit", "--config", config, *(f"--{k}={v}" for k, v in changes.items())]).trainer
        assert trainer.global_step == steps
        found.append({name: float(value) for name, value in trainer.callback_metrics.items() if "second" not in name})
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", sampled([r for r in RECIPES if r != "lora"], 1))
def test_a_recipe_trains(recipe: str, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "examples" / "recipes" / f"{recipe}.yaml").read_text())
    monitor = next(c["init_args"]["monitor"] for c in config["trainer"]["callbacks"] if "ModelCheckpoint" in str(c))
    for (found,) in run_distributed(_fit, 2, recipe, ["shard_fsdp_aligned"], 2, str(tmp_path)):
        assert found[monitor] == found[monitor]
        assert torch.tensor(found["train_loss"]).isfinite()


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "lora"])
def test_every_engine_gives_a_recipe_the_same_numbers(recipe: str, ranks: int, tmp_path: Path) -> None:
    keys = ("train_loss", "val_loss", "val_accuracy", "val_neighbours", "val_near", "discriminator_loss")
    engines = [name for name in ENGINES if (recipe, name) != ("teacher", "shard_deepspeed_stage_3_aligned")]
    for first, *others in run_distributed(_fit, ranks, recipe, engines, 4, str(tmp_path), timeout=600):
        expected = {key: first[key] for key in keys if key in first}
        assert len(expected) > 1
        for other in others:
            # More than two ranks sum in other orders, in fp32.
            wanted = expected if ranks == 2 else pytest.approx(expected, rel=1e-5)
            assert {key: other[key] for key in expected} == wanted


def test_documents_fill_rows_and_no_target_crosses_them() -> None:
    texts = [torch.arange(1, n + 1, dtype=torch.uint8) for n in (5, 4, 3, 8, 2)]
    inputs, targets, numbers = packed.pack(texts, 10)
    assert numbers.tolist() == [[0] * 5 + [1] * 4 + [-1], [0] * 3 + [-1] * 7, [0] * 8 + [1] * 2]
    assert inputs[0].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 0]
    assert targets[0].tolist() == [2, 3, 4, 5, -100, 2, 3, 4, -100, -100]
    assert (targets != -100).sum() == sum(len(text) - 1 for text in texts)


def test_a_packed_document_is_seen_as_if_it_stood_alone() -> None:
    """To fp32 rounding: its positions, and so the rotations, begin elsewhere in the row."""
    torch.manual_seed(0)
    model = Transformer(layers=2, heads=2, width=16, length=32, tie_embeddings=False)
    texts = [torch.randint(256, (n,), dtype=torch.uint8) for n in (12, 9)]
    inputs, _, numbers = packed.pack(texts, 32)
    together = model.features(inputs, packed.document_mask(numbers))[0]
    alone = torch.cat([model.features(text[None].long())[0] for text in texts])
    torch.testing.assert_close(together[:21], alone, rtol=1e-4, atol=1e-5)
    crossing = model.features(inputs)[0]
    assert not torch.allclose(crossing[12:21], alone[12:], rtol=1e-2, atol=1e-3)
