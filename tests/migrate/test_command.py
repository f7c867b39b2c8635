"""The command ``migrate``: its output, and files that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_shard.commands import migrate as migrate_command
from tests.migrate.support import BASE, FILES, arguments, trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Migrated = Callable[..., dict[str, Any]]
Told = Callable[..., str]


def test_output(tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Told) -> None:
    source = str(FILES / "accelerate" / "fsdp2.yaml")
    assert migrate_command.main([source]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["trainer"]["strategy"] == "shard_fsdp"
    assert "fsdp_config.fsdp_auto_wrap_policy" in printed.err
    assert "asking for nothing: " in printed.err
    output = tmp_path / "run.yaml"
    migrate_command.main([source, "--output", str(output)])
    assert output.read_text() == printed.out.replace(source, f"{source} --output {output}")
    assert f"written to {output}" in capsys.readouterr().out
    assert "exists: choose another path" in refused(source, "--output", output)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "a: [1\nb: 2", "can't be read"),
        ("a.json", '{"a":' * 3000 + "1" + "}" * 3000, "a.json can't be read as JSON"),
        ("a.yaml", f"trainer: {{strategy: ddp, devices: {10**30}}}", f"devices is {10**30}, but a node has at most"),
        ("a.json", '{"zero_optimization": {"stage": 1, "stage": 2}}', "'stage' is there twice"),
        ("a.yaml", "learning_rate: 1", "none of the known formats"),
    ],
)
def test_unreadable_file(name: str, text: str, expected: str, tmp_path: Path, refused: Told) -> None:
    (tmp_path / name).write_text(text)
    assert expected in refused(tmp_path / name)


def test_several_files(migrated: Migrated, refused: Told) -> None:
    result = migrated(BASE, FILES / "accelerate" / "fsdp1.yaml", "--to", "shard_fsdp_aligned")
    assert result["trainer"]["accelerator"] == "cpu"
    assert result["model"]["class_path"] == "examples.gpt.GPT"
    assert arguments(result)["aligned"] is True
    both = [FILES / "accelerate" / "fsdp1.yaml", FILES / "deepspeed" / "zero3_bf16.json"]
    assert "each say the whole strategy" in refused(*both)
    cpu = FILES / "accelerate" / "ddp_cpu.yaml"
    auto = dict.fromkeys(("strategy", "devices", "accelerator"), "auto")
    section = migrated({"trainer": {**auto, "max_steps": 3}}, cpu)
    assert section["trainer"] == {
        "strategy": "shard_ddp",
        "precision": "32-true",
        "max_steps": 3,
        "accelerator": "cpu",
        "devices": 2,
        "num_nodes": 1,
    }
    assert "another file says the strategy too" in refused(trainer("shard_ddp"), cpu)
    assert "num_processes is 2, but trainer.devices is 3" in refused({"trainer": {"devices": 3}}, cpu)


def test_what_the_strategy_refuses_is_not_written(refused: Told) -> None:
    fsdp = "lightning_shard.ShardFSDPStrategy"
    assert "do not multiply to the 2 processes" in refused(trainer(fsdp, {"mesh": {"replicate": 3}}))
    assert "units" in refused(trainer(fsdp, {"units": 3.5}))
    assert "shard_deepspeed_stage_2_offload" in refused(trainer("shard_deepspeed_stage_2", precision="16-true"))
