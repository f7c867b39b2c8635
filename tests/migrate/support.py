"""Files of Accelerate, DeepSpeed and Lightning that the tests of migrations write and read."""

from __future__ import annotations

import re
from typing import Any

from lightning_shard import registry
from tests.harness import ROOT

FILES = ROOT / "tests" / "migrate" / "files"
BASE = FILES / "lightning" / "base.yaml"


def with_notes(table: str) -> str:
    """A printed table with the notes that stand below it in the lines that they are of."""
    lines = table.splitlines()
    below = dict(line.split(" ", 1) for line in lines if line.startswith("("))
    return "\n".join(re.sub(r"\(\d+\)", lambda found: below[found[0]], line) for line in lines if line[:1] != "(")


def accelerate(**fields: Any) -> dict[str, Any]:
    """An Accelerate file for two processes."""
    return {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, **fields}


def fsdp(version: int = 2, **fields: Any) -> dict[str, Any]:
    section = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return accelerate(distributed_type="FSDP", fsdp_config={**section, **fields})


def zero(**fields: Any) -> dict[str, Any]:
    return accelerate(distributed_type="DEEPSPEED", deepspeed_config=fields)


def trainer(strategy: Any, arguments: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A Lightning YAML."""
    given = strategy if arguments is None else {"class_path": strategy, "init_args": arguments}
    return {"trainer": {"accelerator": "cpu", "devices": 2, "strategy": given, **fields}}


def arguments(content: dict[str, Any]) -> dict[str, Any]:
    """The strategy's arguments, whether it is written by its name or by its class."""
    strategy = content["trainer"]["strategy"]
    return dict(registry.find(strategy).init_args) if isinstance(strategy, str) else strategy.get("init_args", {})
