"""The example model, its corpus and the quickstart's configuration."""

from __future__ import annotations

import ast
import csv
import importlib
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from examples.gpt import GPT, learning_rate_factor
from examples.python_corpus import PythonCorpus, Windows
from tests.harness import ROOT, run_distributed

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def _small(**arguments: object) -> GPT:
    seed_everything(3, verbose=False)
    sizes = {"layers": 2, "heads": 2, "width": 16, "max_length": 32}
    return GPT(**(sizes | arguments))


def test_windows_cover_the_text_once_with_targets_one_byte_later() -> None:
    text = torch.arange(11, dtype=torch.uint8)
    windows = Windows(text, seq_len=3)
    assert [tuple(part.tolist() for part in window) for window in windows] == [
        ([0, 1, 2], [1, 2, 3]),
        ([3, 4, 5], [4, 5, 6]),
        ([6, 7, 8], [7, 8, 9]),
    ]
    assert windows[0][0].dtype == windows[0][1].dtype == torch.int64


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_a_meta_build_has_the_same_names_shapes_and_initial_values(tie_embeddings: bool) -> None:
    model, meta = _small(tie_embeddings=tie_embeddings), _small(tie_embeddings=tie_embeddings, meta_init=True)
    assert not list(meta.parameters())
    meta.configure_model()
    built = meta.model
    meta.configure_model()
    assert meta.model is built, "a second call must not build anew"
    assert all(p.is_meta for p in meta.parameters())
    assert {n: p.shape for n, p in meta.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    for owner in model.modules():
        if [*owner.parameters(recurse=False), *owner.buffers(recurse=False)] and owner is not model.val_perplexity:
            assert callable(getattr(owner, "reset_parameters", None)), type(owner)

    meta.to_empty(device="cpu")
    if tie_embeddings:  # to_empty makes two tensors of a shared one
        meta.model.head.weight = meta.model.embedding.weight
    for owner in meta.modules():
        if hasattr(owner, "reset_parameters"):
            owner.reset_parameters()
    for (name, mine), theirs in zip(meta.named_parameters(), model.parameters(), strict=True):
        # Drawn from other states of the generator, so only the distribution can be compared; at least 16 entries.
        torch.testing.assert_close(mine.std(unbiased=False), theirs.std(unbiased=False), rtol=0.5, atol=0, msg=name)
    for mine, theirs in zip(meta.model.buffers(), model.model.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_schedule_warms_up_and_falls_to_the_final_rate() -> None:
    factors = [learning_rate_factor(s, warmup_steps=10, total_steps=110, final=0.1) for s in range(120)]
    assert factors[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert factors[10] == max(factors) == 1.0
    assert factors[60] == pytest.approx(0.55)
    assert all(late < early for early, late in pairwise(factors[10:111]))
    assert factors[110:] == [pytest.approx(0.1)] * 10
    assert learning_rate_factor(10**6, warmup_steps=10, total_steps=math.inf, final=0.1) == 1.0
    assert learning_rate_factor(0, warmup_steps=0, total_steps=10, final=0.1) == 1.0


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_linear_weights_decay_and_all_else_does_not(tie_embeddings: bool) -> None:
    model = _small(tie_embeddings=tie_embeddings)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=1, limit_val_batches=0, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, PythonCorpus(seq_len=32, batch_size=2, limit_bytes=200))
    decay, rest = trainer.optimizers[0].param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {names[id(p)] for p in rest["params"]} == {n for n in names.values() if "norm" in n or "embedding" in n}
    assert len(decay["params"]) + len(rest["params"]) == len(names)


def _quickstart(folder: str) -> dict[str, float]:
    """A few steps of the quickstart, then the validation of its checkpoint."""
    from lightning_shard import ShardCLI

    save = ["--trainer.default_root_dir", folder, "--trainer.logger.init_args.save_dir", folder]
    short = ["--trainer.limit_val_batches", "2"]
    data = ["--data.init_args.limit_bytes", "20000"]
    steps = ["--trainer.max_steps", "6", "--trainer.val_check_interval", "3", "--trainer.log_every_n_steps", "2"]
    fit = ShardCLI(args=["fit", "--config", QUICKSTART, *steps, *save, *short, *data]).trainer
    trained = {name: float(value) for name, value in fit.callback_metrics.items()}
    path = fit.checkpoint_callback.last_model_path
    validate = ["validate", "--config", QUICKSTART, "--ckpt_path", path, *save, *short, *data]
    reloaded = ShardCLI(args=validate).trainer.callback_metrics["val_perplexity"]
    return trained | {"reloaded": float(reloaded)}


@pytest.mark.matrix
def test_the_quickstart_trains_saves_and_validates_to_the_same_perplexity(tmp_path: Path) -> None:
    first, second = run_distributed(_quickstart, 2, str(tmp_path), timeout=300)
    assert first["val_perplexity"] == second["val_perplexity"] == first["reloaded"] == second["reloaded"]
    # Each rank logs its own loss; were they equal, the ranks would have seen the same batches.
    assert first["train_loss"] != second["train_loss"]
    assert first["tokens/s"] > 0
    rows = list(csv.DictReader((tmp_path / "version_0" / "metrics.csv").open()))
    logged = [float(row["val_perplexity"]) for row in rows if row["val_perplexity"]]
    assert len(logged) == 2
    assert logged[1] < logged[0] < 256


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of all that is imported from this package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "lightning_shard":
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_what_examples_import_is_there() -> None:
    """Also of those that no test runs, such as benchmarks over minutes."""
    found = {at for path in sorted((ROOT / "examples").rglob("*.py")) for at in _imports(path)}
    assert len(found) > 40
    for module, name in sorted(found):
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
