"""The commands of ``lightning-shard``: one table, whose modules are imported when their command runs.

``fit``, ``validate``, ``test`` and ``predict`` are :class:`~lightning_shard.commands.cli.ShardCLI`, which runs the
commands of the table too. A command is the module of its name, with ``main(arguments)``: it does what the arguments
say, prints, and returns the exit code; what it raises, ``ShardCLI`` reports.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

COMMANDS: Mapping[str, str] = {
    "strategies": "Print the strategy names, or the YAML that equals one of them.",
    "slurm": "Write a SLURM batch script of a run, or submit it.",
    "doctor": "Check the processes of a job: versions, devices, collectives, links between them.",
    "migrate": "Write the YAML for this package from an Accelerate, DeepSpeed or Lightning configuration.",
    "plan": "Say what a run will need: memory per device, what fits, traffic, step time.",
    "checkpoint": "Look into a checkpoint, check it, convert it, or export its weights.",
}
"""One line of help for each command beside those of LightningCLI, in the order of the help."""


def run(name: str, arguments: Sequence[str]) -> int:
    return int(importlib.import_module(f"lightning_shard.commands.{name}").main(arguments))
