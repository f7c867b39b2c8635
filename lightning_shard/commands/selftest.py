"""``lightning-shard selftest``: check that this machine's engines agree bit by bit, save, resume and switch."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_shard.commands.options import count, options_parser

_DESCRIPTION = """\
Train a tiny model by every engine on the processes that this is started on: alone it starts 2 on the CPU, or one for
each GPU; under torchrun or srun it takes those. A line for each name says whether the engine's arithmetic is that of a
plain loop over parameters, whether it trains as the first one does, goes on from its own checkpoint as if it had not
stopped, and goes on from the checkpoint of the name before: bit by bit on up to two processes, to the order of sums on
more. Then a fault is put in, which has to be found. The exit code is 1 if anything differs.
"""


def parser() -> argparse.ArgumentParser:
    parser = options_parser("selftest", _DESCRIPTION)
    add = parser.add_argument
    add("--names", nargs="+", metavar="NAME", help="strategies (default: aligned DDP, FSDP and ZeRO 1 to 3)")
    add("--precision", choices=["32-true", "bf16-mixed"], default="bf16-mixed", help="default: bf16-mixed")
    add("--accelerator", choices=["cpu", "gpu"], help="devices (default: gpu if there are GPUs)")
    add("--devices", type=count, help="processes, if no launcher has started them (default: 2, or all GPUs)")
    folder = "folder of the checkpoints, shared by all nodes and removed at the end (default: selftest)"
    add("--folder", type=Path, default=Path("selftest"), help=folder)
    return parser


def main(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Return the exit code, on rank 0: 0 if all is equal and the fault is found, else 1."""
    options = parser().parse_args(arguments)
    from lightning_shard.commands import selftest_runs

    return selftest_runs.run_selftest(options, os.environ if environ is None else environ)
