"""``lightning-shard plan``: what a run will need per device, and what it will send, before it is queued."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_shard.commands.parser import options_parser
from lightning_shard.errors import ConfigurationError
from lightning_shard.planning import link_speeds, picture
from lightning_shard.planning.quantities import parse_bytes, parse_flops, parse_speed

_T = TypeVar("_T")

_DESCRIPTION = """\
Say what a run will need before it is queued, on any machine: memory per device by kind and at which point of the step,
the largest batch, the fewest devices, bytes over the network and the expected time of a step. One training step runs on
tensors without data. Options that are not named here are those of fit:
lightning-shard plan --nodes 4 --devices 8 --device-memory 80GB --config run.yaml --data.init_args.batch_size 16
"""


def parser() -> argparse.ArgumentParser:
    """Of the options that are the plan's own."""
    parser = options_parser("plan", _DESCRIPTION)
    add = parser.add_argument
    add("--nodes", type=int, help="nodes of the run (default: the configuration's num_nodes)")
    add("--devices", type=int, help="devices, and so processes, on each node (default: the configuration's, or 1)")
    add("--device-memory", type=_bytes, required=True, metavar="SIZE", help="memory of a device: 80GB, 80GiB")
    add("--reserve", type=_bytes, metavar="SIZE", help="of it, left to libraries and fragmentation (default: 5 %%)")
    add("--compare", action="store_true", help="all engines of the package, with and without activation checkpointing")
    add("--batch-size", type=int, help="samples per device and micro-batch (default: those of the data's first batch)")
    add("--intra-node", type=_speed, metavar="SPEED", help="of a device's links inside its node: 450GB/s")
    add("--inter-node", type=_speed, metavar="SPEED", help="of a node's links to others, all together: 400Gb/s")
    add(
        "--links",
        type=Path,
        metavar="FILE",
        help="both speeds, as doctor --output FILE measured them between pairs of ranks, one pair at a time",
    )
    add("--device-peak", type=_flops, metavar="FLOPS", help="of a device in the compute dtype: 989TFLOPS")
    add("--device-name", metavar="NAME", help="the device, whose peak is known: H100")
    add("--efficiency", type=float, default=0.5, help="part of the peak that the model reaches (default: 0.5)")
    add("--picture", type=Path, metavar="FILE", help="draw the bytes by kind into a file (needs matplotlib)")
    add("--no-trace", action="store_true", help="do not run the step: an estimate without activations")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code."""
    options, rest = parser().parse_known_args(arguments)
    check(options)
    if options.picture is not None:
        picture.require()
    # That imports the strategies, which the other commands' help needs not.
    from lightning_shard.commands.plan_text import plan

    print(plan(options, rest))
    return 0


def check(options: argparse.Namespace) -> None:
    """Refuse numbers that can't be, and read what was measured.

    Raises:
        ConfigurationError: with the value and the rule.
    """
    for name in ("nodes", "devices", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}, but must be 1 or more.")
    if not 0 < options.efficiency <= 1:
        raise ConfigurationError(f"--efficiency is {options.efficiency:g}, but is a part of the peak: 0 < it <= 1.")
    if options.device_peak is not None and options.device_name is not None:
        raise ConfigurationError("--device-peak and --device-name both say the peak: give one of them.")
    given = [f"--{n}-node" for n in ("intra", "inter") if getattr(options, f"{n}_node") is not None]
    if options.links is not None and given:
        raise ConfigurationError(
            f"--links {options.links} and {' and '.join(given)} both say how fast links are: give the file, or the "
            "speeds."
        )
    options.measured = None if options.links is None else link_speeds.read(options.links)
    if options.reserve is not None and options.reserve >= options.device_memory:
        raise ConfigurationError("--reserve leaves nothing of --device-memory: give less.")


def _bytes(text: str) -> int:
    return _argument(parse_bytes, text)


def _speed(text: str) -> float:
    return _argument(parse_speed, text)


def _flops(text: str) -> float:
    return _argument(parse_flops, text)


def _argument(parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
