"""``lightning-shard checkpoint inspect|verify|convert|export|clean``: each command and its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_shard.checkpoint.files import layout
from lightning_shard.commands import COMMANDS
from lightning_shard.commands.parser import ShardArgumentParser
from lightning_shard.errors import CheckpointError, ConfigurationError

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
DType = Literal["fp32", "bf16", "fp16"]

_HELP = {
    "inspect": "Print what is in a checkpoint of any form.",
    "verify": "Check that a checkpoint is whole: every file against its checksum.",
    "convert": "Write a checkpoint in the other form: a portable directory, or one stock Lightning .ckpt file.",
    "clean": "List what interrupted saves and removals left in a folder, or remove it.",
    "export": "Write the weights as safetensors files with a Hugging Face index.",
}


def parser() -> ShardArgumentParser:
    """Of the commands below ``checkpoint``."""
    parser = ShardArgumentParser(prog="lightning-shard [options] checkpoint", description=COMMANDS["checkpoint"])
    commands = parser.add_subcommands(dest="command")
    for name, text in _HELP.items():
        command = ShardArgumentParser(description=text)
        add = command.add_argument
        add("path", type=str, help="a folder" if name == "clean" else "a checkpoint: a directory or a file")
        if name == "clean":
            add("--remove", type=bool, default=False, help="remove it")
        if name == "convert":
            add("target", type=str, help="where to write the other form")
            add(
                "--form",
                type=Literal["portable", "full"] | None,
                default=None,
                help="the form to write. Default: full of a portable directory, portable of all else",
            )
            add("--weights_only", type=bool, default=False, help="leave the optimizers' state out")
        if name == "export":
            add("folder", type=str, help="where to write the files")
            add("--dtype", type=DType | None, default=None, help="of floating-point tensors; default: as stored")
            add("--module", type=str, default="", help="FQN of a submodule to export alone, under its own names")
            add("--max_shard_size", type=str, default="5GB", help="bytes of tensors in a file")
        commands.add_subcommand(name, command, help=text)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Do what is asked for and print what came of it; the exit code.

    Raises:
        CheckpointError, ConfigurationError: what the user is to be told.
    """
    config = parser().parse_args(list(arguments))
    print(_RUN[config.command](config[config.command]))
    return 0


def _inspect(arguments: Mapping[str, Any]) -> str:
    from lightning_shard.checkpoint.foreign.forms import open_any
    from lightning_shard.checkpoint.inspect import describe

    return describe(arguments["path"], open_any(arguments["path"], optimizers="numbered"))


def _verify(arguments: Mapping[str, Any]) -> str:
    from lightning_shard.checkpoint.inspect import verify

    checked = verify(arguments["path"])
    return f"{arguments['path']} is whole: {len(checked)} file{'s' * (len(checked) != 1)} checked"


def _convert(arguments: Mapping[str, Any]) -> str:
    from lightning_shard.checkpoint.files.contents import FULL, PORTABLE
    from lightning_shard.checkpoint.foreign.forms import open_any
    from lightning_shard.checkpoint.foreign.lightning_file import write_full
    from lightning_shard.checkpoint.save import write_portable

    path, target = arguments["path"], Path(arguments["target"])
    if target.exists():
        raise CheckpointError(f"{target} exists: choose another path, or remove it")
    stored = open_any(path, optimizers="none" if arguments["weights_only"] else "named")
    form = arguments["form"] or (FULL if stored.form == PORTABLE else PORTABLE)
    (write_full if form == FULL else write_portable)(target, stored)
    return f"{path} ({stored.form}) -> {target} ({form})"


def _export(arguments: Mapping[str, Any]) -> str:
    from lightning_shard.checkpoint.foreign.export import export
    from lightning_shard.checkpoint.foreign.forms import open_any

    limit = _bytes(arguments["max_shard_size"])
    files = export(
        open_any(arguments["path"], optimizers="none"),
        arguments["folder"],
        dtype=layout.torch_dtype(_DTYPES[arguments["dtype"]]) if arguments["dtype"] else None,
        module=arguments["module"],
        max_shard_bytes=limit,
    )
    return "\n".join(str(file) for file in files)


def _clean(arguments: Mapping[str, Any]) -> str:
    from lightning_shard.checkpoint.files.commit import clean

    found = clean(arguments["path"], remove=arguments["remove"])
    done = "removed" if arguments["remove"] else "left behind (--remove true removes it)"
    return "\n".join(f"{path} {done}" for path in found) or f"nothing is left behind in {arguments['path']}"


_RUN = {"clean": _clean, "inspect": _inspect, "verify": _verify, "convert": _convert, "export": _export}


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise ConfigurationError(f"max_shard_size is {text!r}, but must be a number of bytes, such as 5GB or 500MB.")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])
