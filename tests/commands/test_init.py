"""The questionnaire: what it writes trains as it is, and it writes over nothing."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import yaml

from lightning_shard import ConfigurationError, ShardCLI
from lightning_shard.commands import init
from tests.harness import run_distributed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TWO = ["slurm=no", "devices=2 cpu", "precision=bf16-mixed"]


def _fit(config: str) -> tuple[int, str, str]:
    cli = ShardCLI(args=["fit", "--config", config, "--trainer.max_steps=2", "--trainer.default_root_dir=."])
    return cli.trainer.global_step, type(cli.trainer.strategy).__name__, cli.trainer.precision_plugin.precision


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal
    return tmp_path


def test_what_it_writes_trains_and_is_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init.main(["--answers", "engine=shard_fsdp_grad_op_aligned", *TWO]) == 0
    assert "train with: lightning-shard fit --config run.yaml" in capsys.readouterr().out
    expected = (2, "ShardFSDPStrategy", "bf16-mixed")
    assert run_distributed(_fit, 2, str(folder / "run.yaml")) == [expected] * 2
    written = (folder / "run.yaml").read_text()
    with pytest.raises(ConfigurationError, match="give --force"):
        init.main(["--answers", *TWO])
    assert (folder / "run.yaml").read_text() == written


def test_an_example_is_written_to_a_folder_without_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert init.main(["--example", "quickstart"]) == 0
    written = yaml.safe_load((tmp_path / "quickstart.yaml").read_text())
    assert (written["model"]["class_path"], written["data"]["class_path"]) == ("gpt.GPT", "python_corpus.PythonCorpus")
    assert {path.name for path in tmp_path.iterdir()} == {"quickstart.yaml", "gpt.py", "python_corpus.py"}
    with pytest.raises(ConfigurationError, match=r"quickstart\.yaml exists"):
        init.main(["--example", "quickstart"])


def test_answers_come_from_a_file_or_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "answers.yaml").write_text("slurm: yes\ndevices: 2x8 gpu\nengine: shard_fsdp_hybrid\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    typed = iter(["my.net.Net,my.data.Data", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(typed))
    assert init.main(["--answers", "answers.yaml"]) == 0
    text = (folder / "run.yaml").read_text()
    assert "lightning-shard slurm --config run.yaml --submit" in text
    content = yaml.safe_load(text)
    given = {key: content["trainer"][key] for key in ("strategy", "accelerator", "num_nodes", "devices")}
    assert given == {"strategy": "shard_fsdp_hybrid", "accelerator": "gpu", "num_nodes": 2, "devices": 8}
    assert (content["model"]["class_path"], content["data"]["class_path"]) == ("my.net.Net", "my.data.Data")


def test_the_accelerator_is_the_target_machines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_shard.devices.visible", lambda: 0)
    for output, answers, expected in (
        ("gpu.yaml", ["slurm=no", "devices=2x8"], ("gpu", "bf16-mixed")),
        ("cpu.yaml", ["slurm=yes", "devices=2x8 cpu"], ("cpu", "32-true")),
    ):
        init.main(["--output", output, "--answers", *answers])
        trainer = yaml.safe_load((folder / output).read_text())["trainer"]
        assert (trainer["accelerator"], trainer["precision"]) == expected
    # Several nodes without SLURM are started by torchrun.
    command = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE:29500 -m lightning_shard"
    assert f"train with: {command} fit --config gpu.yaml    # on each node" in capsys.readouterr().out
    assert command in (folder / "gpu.yaml").read_text()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("engine=shard_fdsp", "engine is 'shard_fdsp', which is no answer.* Did you mean shard_fsdp"),
        ("gpus=8", "there is no question gpus. They are train, devices, slurm, engine, precision"),
        ("nowhere.yaml", "there is no such file"),
    ],
)
def test_answers_that_are_none(answer: str, says: str, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=says):
        init.main(["--answers", answer])
    assert list(folder.iterdir()) == []
