"""All tables of README.md, one after the other, with the load of the machine ahead of each and after it.

python -m examples.benchmarks                  # two CPU processes, some hours, on a quiet machine
python -m examples.benchmarks engines goodput  # these alone
"""

from __future__ import annotations

import subprocess
import sys

from examples.benchmarks.races import say
from examples.benchmarks.report import load

ENGINES = ["engines", "--skip", "memory", "--rounds", "16", "--steps", "3", "--warmup", "2"]
TABLES = [
    ["engines", "--control", "--skip", "memory"],
    ENGINES,
    ["engines", "--skip", "time"],
    [*ENGINES, "--races", "fsdp", "--compile", "--checkpointing", "selective"],
    *(["overheads"], ["finetune"], ["max_batch"], ["checkpoint_io"], ["scale"], ["published"], ["goodput"]),
]


def main(only: list[str]) -> int:
    """Run them, in processes of their own. Return 1 if one of them failed."""
    failed = []
    for table in TABLES:
        if only and table[0] not in only:
            continue
        command = " ".join(table)
        say(f"\n{command}: {load()}")
        if subprocess.run(
            [sys.executable, "-m", f"examples.benchmarks.{table[0]}", *table[1:]], check=False
        ).returncode:
            failed.append(command)
        say(f"{command} has ended: {load()}")
    say("\n".join(["", *(f"FAILED: {command}" for command in failed)]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
