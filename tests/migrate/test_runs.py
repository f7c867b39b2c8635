"""Migrated configurations run: two steps on two processes through the command line, for files of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from examples.gpt import GPT
from lightning_shard import ShardCLI
from lightning_shard.commands import migrate as migrate_command
from tests.harness import ROOT, run_distributed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FILES = ROOT / "tests" / "migrate" / "files"
DEEPSPEED_FILES = ROOT / "tests/engines/zero/config/files"
BASE = FILES / "lightning" / "base.yaml"
OWN = FILES / "own"
# The files are of GPUs, and some of several nodes.
HERE = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.num_nodes=1"]
WITHOUT_SCHEDULE = ["--model=tests.migrate.test_runs.WithoutSchedule"]
SECTIONS = ["--model=tests.migrate.test_runs.WithoutOptimizer", "--data.init_args.batch_size=4"]


class WithoutOptimizer(GPT):
    """Leaves the optimizer and the schedule to the DeepSpeed file."""

    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


class WithoutSchedule(GPT):
    """Leaves the schedule to the DeepSpeed file, whose values are "auto"."""

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


TO_OTHERS: dict[str, tuple[list[object], str, list[str]]] = {
    "deepspeed to fsdp": (
        [FILES / "deepspeed" / "zero3_bf16.json", "--to", "shard_fsdp", "--lossy"],
        "ShardFSDPStrategy",
        [],
    ),
    "own fsdp to deepspeed": (
        [OWN / "fsdp.yaml", "--to", "shard_deepspeed_stage_3", "--lossy"],
        "ShardDeepSpeedStrategy",
        [],
    ),
    "own deepspeed to fsdp": ([OWN / "deepspeed.yaml", "--to", "shard_fsdp_offload"], "ShardFSDPStrategy", []),
}
"""Name to the arguments of ``migrate``, the strategy that comes out, and further options of the run."""


def _strategy(path: Path) -> str:
    kind = "DeepSpeed" if "deepspeed" in path.stem else "DDP" if "ddp" in path.stem else "FSDP"
    return f"Shard{kind}Strategy"


STOCK = [path for folder in ("accelerate", "lightning") for path in (FILES / folder).glob("*.yaml") if path != BASE]
OPTIONS = {"zero2_fp16_auto": WITHOUT_SCHEDULE, "zero3_offload": []}
EVERY: dict[str, tuple[list[object], str, list[str]]] = {
    **TO_OTHERS,
    **{f"{path.parent.stem} {path.stem}": ([path, "--lossy"], _strategy(path), []) for path in sorted(STOCK)},
    **{
        f"deepspeed {path.stem}": ([path], "ShardDeepSpeedStrategy", OPTIONS.get(path.stem, SECTIONS))
        for path in sorted(DEEPSPEED_FILES.glob("*.json"))
        if "nvme" not in path.stem
    },
}


def _fit(runs: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Return the results of ``lightning-shard fit`` with the arguments of each run, on each rank."""
    results = {}
    for name, arguments in runs.items():
        cli = ShardCLI(args=["fit", *arguments])
        saved = Path(cli.trainer.checkpoint_callback.best_model_path)
        results[name] = {
            "steps": cli.trainer.global_step,
            "strategy": type(cli.trainer.strategy).__name__,
            "perplexity": float(cli.trainer.callback_metrics["val_perplexity"]),
            "saved": "file" if saved.is_file() else "directory" if saved.is_dir() else "nothing",
        }
    return results


def _migrate(table: dict[str, tuple[list[object], str, list[str]]], folder: Path) -> dict[str, list[str]]:
    """Name to the arguments of the run with the file that was written."""
    arguments = {}
    for name, (words, _, options) in table.items():
        output = folder / f"{name.replace(' ', '_')}.yaml"
        migrate_command.main([*map(str, words), "--output", str(output)])
        arguments[name] = ["--config", str(BASE), "--config", str(output), *HERE, *options]
    return arguments


def _check(table: dict[str, tuple[list[object], str, list[str]]], folder: Path) -> None:
    arguments = _migrate(table, folder)
    first, second = run_distributed(_fit, 2, arguments, timeout=60 * len(arguments))
    assert first == second
    for name, result in first.items():
        assert (result["steps"], result["strategy"]) == (2, table[name][1]), name
        assert 1 < result["perplexity"] < 400, name  # an untrained model guesses among 256 bytes
        assert result["saved"] == "directory", name


@pytest.mark.matrix
def test_every_file_trains(tmp_path: Path) -> None:
    _check(EVERY, tmp_path)


def test_files_of_this_package_are_read_as_they_are(tmp_path: Path) -> None:
    for path in sorted(OWN.glob("*.yaml")):
        output = tmp_path / path.name
        migrate_command.main([str(path), "--output", str(output)])
        assert yaml.safe_load(output.read_text()) == yaml.safe_load(path.read_text())
