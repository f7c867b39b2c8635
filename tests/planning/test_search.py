"""``plan --search``: what is compared, what wins, and that its YAML trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_shard import ConfigurationError, ShardCLI
from lightning_shard.commands import plan as plan_command
from lightning_shard.planning.planner import Form, ranked
from lightning_shard.planning.step_time import INSIDE, PRODUCTS, StepTime
from tests.harness import run_distributed

pytest.importorskip("transformers")

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 16,
}
H100 = ["--device-name=H100", "--intra-node=450GB/s", "--inter-node=400Gb/s"]


def search(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    given = [str(folder / "config.json"), "--seq-len=16", "--search", f"--output={folder}/best.yaml", *H100, *arguments]
    text = plan_command.make_plan(given).text
    return text, yaml.safe_load((folder / "best.yaml").read_text()) if (folder / "best.yaml").exists() else {}


def form(name: str, seconds: float, **init_args: Any) -> Form:
    time = StepTime(parts={PRODUCTS: 0.6 * seconds, INSIDE: 0.4 * seconds})
    return Form(name=name, init_args=init_args, batch=2, micro_batches=1, time=time, device=(10, 10))


def test_the_fastest_is_first_and_the_simplest_of_equals() -> None:
    slow, plain = form("shard_fsdp", 2.0), form("shard_ddp", 1.0)
    found = [
        slow,
        form("shard_ddp", 1.0, activation_checkpointing="units"),
        form("shard_ddp", 1.0, compile=True),
        plain,
    ]
    assert ranked(found) == [plain, slow]
    assert plain.cells == ["shard_ddp", "-", "2", "1", "1 s", "compute", "10 B"]


@pytest.mark.matrix
def test_the_global_batch_is_kept(tmp_path: Path) -> None:
    text, content = search(tmp_path, "--device-memory=80GB", "--nodes=2", "--devices=4", "--global-batch=96")
    assert re.search(r"^the fastest of \d+ forms that keep a global batch of 96 and fit", text, re.MULTILINE)
    trainer, data = content["trainer"], content["data"]["init_args"]
    assert (trainer["num_nodes"], trainer["devices"]) == (2, 4)
    assert 8 * data["batch_size"] * trainer["accumulate_grad_batches"] == 96
    names = re.findall(r"^(shard_\w+) +.* [\d.]+ m?s +[a-z]", text[text.index("the fastest of") :], re.MULTILINE)
    assert len(names) == len(set(names)) == 8


@pytest.mark.matrix
def test_what_is_short_of_memory_accumulates_or_shards(tmp_path: Path) -> None:
    # The CUDA context and its kin need more than this has: nothing fits, and nothing is written.
    text, content = search(tmp_path, "--device-memory=450MB", "--devices=2", "--batch-size=4")
    assert "search: nothing fits that has a global batch of 8" in text
    assert content == {}
    # Of the least of them there is room, with the smallest batch.
    text, content = search(tmp_path, "--device-memory=530MB", "--devices=2", "--batch-size=4")
    assert re.search(r"^the fastest of \d+ forms that keep a global batch of 8 and may fit", text, re.MULTILINE)
    assert content["data"]["init_args"]["batch_size"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices=2", "--global-batch=7"], "a global batch of 7 does not divide over 2 devices"),
        (["--devices=2", "--no-trace"], "--search needs the step's activations"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        search(tmp_path, "--device-memory=80GB", *arguments)
    with pytest.raises(ConfigurationError, match="say the device by --device-name"):
        plan_command.make_plan(["transformers.LlamaConfig", "--device-memory=80GB", "--search"])


def _fit(config: str) -> tuple[int, int, str]:
    trainer = ShardCLI(
        args=[
            "fit",
            f"--config={config}",
            "--trainer.max_steps=2",
            "--trainer.accelerator=cpu",
            "--trainer.logger=false",
        ]
    ).trainer
    assert trainer.train_dataloader is not None
    return trainer.global_step, trainer.train_dataloader.batch_size, type(trainer.strategy).__name__


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_its_yaml_trains_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, content = search(tmp_path, "--device-memory=80GB", "--devices=2", "--batch-size=2", "--global-batch=8")
    # What the compiler makes of it is tested elsewhere, and takes a minute.
    content["trainer"]["strategy"]["init_args"].pop("compile", None)
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(content))
    expected = (
        2,
        content["data"]["init_args"]["batch_size"],
        content["trainer"]["strategy"]["class_path"].split(".")[-1],
    )
    assert run_distributed(_fit, 2, str(tmp_path / "best.yaml")) == [expected] * 2
