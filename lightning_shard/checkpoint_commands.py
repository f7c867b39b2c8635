"""``lightning-shard checkpoint inspect|verify|convert|export``: what each does, and its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from lightning_shard.checkpoint import layout
from lightning_shard.errors import CheckpointError, ConfigurationError

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
DType = Literal["fp32", "bf16", "fp16"]

HELP = {
    "inspect": "Print what is in a checkpoint of any form.",
    "verify": "Check that a checkpoint is whole: every file against its checksum.",
    "convert": "Write a checkpoint in the other form: a portable directory, or one stock Lightning .ckpt file.",
    "export": "Write the weights as safetensors files with a Hugging Face index.",
}


def add_to(parser: ArgumentParser) -> None:
    """Add the four commands to the parser of ``checkpoint``."""
    commands = parser.add_subcommands(dest="command")
    for name, text in HELP.items():
        command = type(parser)(description=text)
        command.add_argument("path", type=str, help="a checkpoint: a directory or a file")
        if name == "convert":
            command.add_argument("target", type=str, help="where to write the other form")
            command.add_argument(
                "--form",
                type=Literal["portable", "full"] | None,
                default=None,
                help="the form to write. Default: full of a portable directory, portable of all else",
            )
            command.add_argument("--weights_only", type=bool, default=False, help="leave the optimizers' state out")
        if name == "export":
            command.add_argument("folder", type=str, help="where to write the files")
            command.add_argument(
                "--dtype", type=DType | None, default=None, help="of floating-point tensors; default: as stored"
            )
            command.add_argument(
                "--module", type=str, default="", help="FQN of a submodule to export alone, under its own names"
            )
            command.add_argument("--max_shard_size", type=str, default="5GB", help="bytes of tensors in a file")
        commands.add_subcommand(name, command, help=text)


def run(config: Mapping[str, Any]) -> str:
    """Do what the parsed ``checkpoint`` section asks for; returns the text to print.

    Raises:
        CheckpointError, ConfigurationError: what the user is to be told.
    """
    name = config["command"]
    return _RUN[name](config[name])


def _inspect(arguments: Mapping[str, Any]) -> str:
    from lightning_shard.checkpoint.forms import open_any
    from lightning_shard.checkpoint.inspect import describe

    return describe(arguments["path"], open_any(arguments["path"], optimizers="numbered"))


def _verify(arguments: Mapping[str, Any]) -> str:
    from lightning_shard.checkpoint.inspect import verify

    checked = verify(arguments["path"])
    return f"{arguments['path']} is whole: {len(checked)} file{'s' * (len(checked) != 1)} checked"


def _convert(arguments: Mapping[str, Any]) -> str:
    from lightning_shard.checkpoint.forms import open_any
    from lightning_shard.checkpoint.full import write_full
    from lightning_shard.checkpoint.stored import FULL, PORTABLE, write_portable

    path, target = arguments["path"], Path(arguments["target"])
    if target.exists():
        raise CheckpointError(f"{target} exists: choose another path, or remove it")
    stored = open_any(path, optimizers="none" if arguments["weights_only"] else "named")
    form = arguments["form"] or (FULL if stored.form == PORTABLE else PORTABLE)
    (write_full if form == FULL else write_portable)(target, stored)
    return f"{path} ({stored.form}) -> {target} ({form})"


def _export(arguments: Mapping[str, Any]) -> str:
    from lightning_shard.checkpoint.export import export
    from lightning_shard.checkpoint.forms import open_any

    limit = _bytes(arguments["max_shard_size"])
    files = export(
        open_any(arguments["path"], optimizers="none"),
        arguments["folder"],
        dtype=layout.torch_dtype(_DTYPES[arguments["dtype"]]) if arguments["dtype"] else None,
        module=arguments["module"],
        max_shard_bytes=limit,
    )
    return "\n".join(str(file) for file in files)


_RUN = {"inspect": _inspect, "verify": _verify, "convert": _convert, "export": _export}


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise ConfigurationError(f"max_shard_size is {text!r}, but must be a number of bytes, such as 5GB or 500MB.")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])
