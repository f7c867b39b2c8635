"""``lightning-shard checkpoint inspect|verify|convert|export|clean``: each command and its arguments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_shard.commands import COMMANDS
from lightning_shard.commands.options import UsageError
from lightning_shard.commands.parser import ShardArgumentParser

DType = Literal["fp32", "bf16", "fp16"]
Form = Literal["portable", "full"]

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
            add("--form", type=Form | None, default=None, help="default: full of a portable directory, else portable")
            add("--weights_only", type=bool, default=False, help="leave the optimizers' state out")
        if name == "export":
            add("folder", type=str, help="where to write the files")
            add("--dtype", type=DType | None, default=None, help="of floating-point tensors; default: as stored")
            add("--module", type=str, default="", help="FQN of a submodule to export alone, under its own names")
            add("--ema", action="store_true", help="write averages of weights in the place of the weights")
            add("--max_shard_size", type=str, default="5GB", help="bytes of tensors in a file")
        commands.add_subcommand(name, command, help=text)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Do what is asked for and print what came of it; the exit code."""
    config = parser().parse_args(list(arguments))
    print(_RUN[config.command](**config[config.command].as_dict()))
    return 0


def _inspect(path: str) -> str:
    from lightning_shard.checkpoint.inspect import describe, open_any

    return describe(path, open_any(path, optimizers="numbered"))


def _verify(path: str) -> str:
    from lightning_shard.tools import verify

    checked = verify(path)
    return f"{path} is whole: {len(checked)} file{'s' * (len(checked) != 1)} checked"


def _convert(path: str, **options: Any) -> str:
    from lightning_shard.tools import convert

    done = convert(path, **options)
    return f"{path} ({done.source_form}) -> {done.path} ({done.form})"


def _export(**options: Any) -> str:
    from lightning_shard.tools import export

    return "\n".join(map(str, export(**options)))


def _clean(path: str, remove: bool) -> str:
    from lightning_shard.checkpoint.files.commit import clean

    if "://" not in path and not Path(path).is_dir():
        raise UsageError(f"{path!r} is no folder.")
    done = "removed" if remove else "left behind (--remove true removes it)"
    return "\n".join(f"{found} {done}" for found in clean(path, remove=remove)) or f"nothing is left behind in {path}"


_RUN: Mapping[str, Any] = {
    "clean": _clean, "inspect": _inspect, "verify": _verify, "convert": _convert, "export": _export,
}  # fmt: skip
