"""The example model, its corpus and the quickstart's configuration."""

from __future__ import annotations

import ast
import csv
import importlib
import inspect
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from examples import python_corpus
from examples.gpt import GPT, Rotary, learning_rate_factor
from examples.python_corpus import PythonCorpus, Windows
from tests.harness import ROOT, run_distributed

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def _small(**arguments: object) -> GPT:
    seed_everything(3, verbose=False)
    sizes = {"layers": 2, "heads": 2, "width": 16, "max_length": 32}
    return GPT(**(sizes | arguments))


# The corpus


def test_files_are_split_without_overlap_and_the_same_each_time() -> None:
    names = python_corpus.source_files(python_corpus.standard_library())
    train, validation = python_corpus.split(names, 0.05)
    assert sorted(train + validation) == names
    assert not set(train) & set(validation)
    assert python_corpus.split(names, 0.05) == (train, validation)
    # 0.05 of some 500 files; three standard deviations of a binomial.
    assert len(validation) == pytest.approx(0.05 * len(names), abs=3 * math.sqrt(0.05 * 0.95 * len(names)))


def test_a_file_stays_where_it_is_whatever_other_files_there_are() -> None:
    names = python_corpus.source_files(python_corpus.standard_library())
    _, validation = python_corpus.split(names, 0.05)
    _, of_some = python_corpus.split(names[::2], 0.05)
    assert of_some == [name for name in names[::2] if name in validation]


def test_files_that_are_no_text_or_not_ours_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("other")
    (tmp_path / "latin.py").write_bytes(b"\xe4")
    (tmp_path / "b.py").write_text("bb")
    (tmp_path / "a.py").write_text("a")
    names = python_corpus.source_files(tmp_path)
    assert names == ["a.py", "b.py", "latin.py"]
    assert bytes(python_corpus.read(tmp_path, names, None).tolist()) == b"abb"
    assert bytes(python_corpus.read(tmp_path, names, 2).tolist()) == b"ab"


def test_windows_cover_the_text_once_with_targets_one_byte_later() -> None:
    text = torch.arange(11, dtype=torch.uint8)
    windows = Windows(text, seq_len=3)
    assert [tuple(part.tolist() for part in window) for window in windows] == [
        ([0, 1, 2], [1, 2, 3]),
        ([3, 4, 5], [4, 5, 6]),
        ([6, 7, 8], [7, 8, 9]),
    ]
    assert windows[0][0].dtype == windows[0][1].dtype == torch.int64


def test_the_datamodule_gives_batches_of_both_parts() -> None:
    data = PythonCorpus(seq_len=16, batch_size=4, limit_bytes=1000)
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader()):
        inputs, targets = next(iter(loader))
        assert inputs.shape == targets.shape == (4, 16)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(data.train.text, data.validation.text)


# The model


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_the_untrained_loss_is_near_that_of_a_uniform_guess() -> None:
    inputs, targets = torch.randint(256, (2, 4, 32))
    loss = _small().training_step((inputs, targets), 0)
    # Logits begin with a standard deviation of 0.02 * sqrt(width) = 0.08, which adds half its square.
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_later_bytes_do_not_change_earlier_logits() -> None:
    model = _small().eval()
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    before, after = model(tokens), model(changed)
    # Not bitwise: matrix products may block another way.
    torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, 20:], before[:, 20:], rtol=0, atol=1e-3)


def test_order_of_bytes_matters() -> None:
    model = _small().eval()
    tokens = torch.arange(8).unsqueeze(0)
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    # Without positions the last byte would attend to the same set. The weights begin small, and so the difference.
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-7


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(width=8, length=16)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 16, 8)
    scores = (rotary(query) @ rotary(key).mT).squeeze()
    for distance in (0, 3):
        diagonal = scores.diagonal(-distance)
        # fp32 sums of 8 products of size about 1.
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)


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


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"width=18 with heads=4.*multiple of 8"):
        GPT(width=18, heads=4)


# The optimizer and its schedule


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


# The quickstart


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


@pytest.mark.parametrize("documented", [GPT, PythonCorpus])
def test_help_has_a_text_for_each_field(documented: type) -> None:
    names = list(inspect.signature(documented).parameters)
    assert [n for n in names if f"        {n}: " not in (documented.__doc__ or "")] == []


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
