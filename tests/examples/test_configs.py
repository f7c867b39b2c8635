"""Every YAML file in ``configs/`` runs: two steps on two processes, with the sizes made tiny."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_shard import ShardCLI, registry
from lightning_shard.precision.policy import PRECISIONS as PRECISION_STRINGS
from lightning_shard.precision.policy import short
from tests.compiled import NVME, need
from tests.harness import ROOT, run_distributed

CONFIGS = ROOT / "configs"
BASE = CONFIGS / "base.yaml"
STRATEGIES = sorted((CONFIGS / "strategy").glob("*.yaml"))
PRECISIONS = sorted((CONFIGS / "precision").glob("*.yaml"))
WHOLE = sorted(CONFIGS.glob("*.yaml"))
# The first is run by test_classifier_example.py; the second needs weights that are too large for a test.
PRETRAINED = [CONFIGS / "pretrained" / "minilm.yaml", CONFIGS / "pretrained" / "smollm2.yaml"]
CLUSTER = sorted((CONFIGS / "slurm").glob("*.yaml"))

TINY = {
    "--model.init_args.layers": "1",
    "--model.init_args.heads": "2",
    "--model.init_args.width": "8",
    "--model.init_args.max_length": "16",
    "--data.init_args.seq_len": "16",
    "--data.init_args.batch_size": "2",
    "--data.init_args.limit_bytes": "4000",
    "--trainer.max_steps": "2",
    "--trainer.val_check_interval": "2",
    "--trainer.limit_val_batches": "1",
    "--trainer.num_sanity_val_steps": "0",
    "--trainer.enable_progress_bar": "false",
    "--trainer.enable_model_summary": "false",
}


def _fit(configs: list[str], *changes: str) -> dict[str, Any]:
    """On each rank: what came of ``lightning-shard fit`` with these files."""
    arguments = [word for config in configs for word in ("--config", config)]
    tiny = [f"{option}={value}" for option, value in TINY.items()]
    if any("TQDMProgressBar" in Path(config).read_text() for config in configs):
        tiny.remove("--trainer.enable_progress_bar=false")  # Lightning refuses it beside a progress bar
    cli = ShardCLI(args=["fit", *arguments, *tiny, *changes])
    callback = cli.trainer.checkpoint_callback
    return {
        "steps": cli.trainer.global_step,
        "strategy": type(cli.trainer.strategy).__name__,
        "aligned": cli.trainer.strategy.aligned,
        "preemption": cli.trainer.strategy.preemption.seconds_before_limit,
        "precision": cli.trainer.precision,
        "compute": short(cli.trainer.strategy.policy.compute),
        "perplexity": float(cli.trainer.callback_metrics["val_perplexity"]),
        "checkpoint": os.path.exists(callback.best_model_path),
    }


def _check(results: list[dict[str, Any]]) -> dict[str, Any]:
    assert results[0] == results[1]
    assert results[0]["steps"] == 2
    assert results[0]["checkpoint"]
    assert 1 < results[0]["perplexity"] < 400  # an untrained model guesses among 256 bytes
    return results[0]


def test_one_overlay_per_name() -> None:
    assert {path.stem for path in STRATEGIES} == set(registry.PRESETS)
    assert {path.stem for path in PRECISIONS} == set(PRECISION_STRINGS)
    tested = {*STRATEGIES, *PRECISIONS, *WHOLE, *PRETRAINED, *CLUSTER}
    assert {path for path in CONFIGS.rglob("*") if path.suffix in (".yaml", ".yml")} == tested


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_strategy(path: Path, request: pytest.FixtureRequest) -> None:
    if "nvme" in path.stem:
        need(request, *NVME)
    result = _check(run_distributed(_fit, 2, [str(BASE), str(path)]))
    preset = registry.PRESETS[path.stem]
    assert result["strategy"] == preset.class_path.rpartition(".")[2]
    assert result["aligned"] is path.stem.endswith("_aligned")


@pytest.mark.parametrize("path", PRECISIONS, ids=lambda path: path.stem)
def test_precision(path: Path) -> None:
    # AdamW's state underflows in the plain form of 16-true, as its overlay says.
    strategy = [str(CONFIGS / "strategy" / "shard_fsdp_aligned.yaml")] if path.stem == "16-true" else []
    result = _check(run_distributed(_fit, 2, [str(BASE), *strategy, str(path)]))
    assert result["precision"] == path.stem
    assert result["compute"] == {"32": "fp32", "bf": "bf16", "16": "fp16"}[path.stem[:2]]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_whole_run(path: Path) -> None:
    _check(run_distributed(_fit, 2, [str(path)]))


def test_multi_node() -> None:
    [path] = CLUSTER
    settings = yaml.safe_load(path.read_text())["trainer"]
    assert (settings["num_nodes"], settings["devices"], settings["accelerator"]) == (2, 8, "gpu")
    here = ("--trainer.num_nodes=1", "--trainer.devices=2", "--trainer.accelerator=cpu")
    result = _check(run_distributed(_fit, 2, [str(BASE), str(path)], *here))
    assert (result["strategy"], result["preemption"]) == ("ShardFSDPStrategy", 180.0)


@pytest.mark.parametrize("path", [*STRATEGIES, *PRECISIONS], ids=lambda path: path.stem)
def test_an_overlay_is_one_line_and_says_why(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    [(section, [(key, value)])] = [(name, list(part.items())) for name, part in yaml.safe_load(text).items()]
    assert (section, value) == ("trainer", path.stem)
    assert key == path.parent.name


def test_readme_names_every_file_that_is_there() -> None:
    text = (CONFIGS / "README.md").read_text()
    for path in (*WHOLE, *PRETRAINED, *CLUSTER):
        assert path.name in text
    for name in (*registry.PRESETS, *(path.stem for path in PRECISIONS)):
        assert f"`{name}`" in text or f"`{name.removesuffix('_aligned')}`" in text, name
