"""``lightning-shard checkpoint inspect|verify|convert|export|clean``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from lightning_shard.commands import COMMANDS
from lightning_shard.commands.options import OptionsParser, UsageError, options_parser
from lightning_shard.precision.words import DType

_HELP = {
    "inspect": "Print the content of a checkpoint of any form.",
    "verify": "Check that a checkpoint is whole: every file against its checksum.",
    "convert": "Write a checkpoint in the other form: a portable directory, or one stock Lightning .ckpt file.",
    "clean": "List the remains of interrupted saves and removals in a folder, or remove them.",
    "export": "Write the weights as safetensors files with a Hugging Face index.",
}


def parser() -> OptionsParser:
    parser = options_parser("checkpoint", COMMANDS["checkpoint"])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _HELP.items():
        add = commands.add_parser(name, description=text, help=text, allow_abbrev=False).add_argument
        add("path", help="a folder" if name == "clean" else "a checkpoint: a directory or a file")
        if name == "clean":
            add("--remove", action="store_true", help="remove it")
        if name == "convert":
            add("target", help="path to write to")
            form = "form to write (default: full of a portable directory, else portable)"
            add("--form", choices=["portable", "full"], help=form)
            add("--weights_only", action="store_true", help="leave the optimizers' state out")
        if name == "export":
            add("folder", help="folder to write to")
            dtype = "dtype of floating-point tensors (default: as stored)"
            add("--dtype", choices=get_args(DType), help=dtype)
            add("--module", default="", help="FQN of a submodule to export alone, under its own names")
            add("--ema", action="store_true", help="write averages of weights in the place of the weights")
            add("--max_shard_size", default="5GB", help="bytes of tensors in a file")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = vars(parser().parse_args(arguments))
    print(_run_subcommand(options.pop("command"), options.pop("path"), options))
    return 0


def _run_subcommand(command: str, path: str, options: Mapping[str, Any]) -> str:
    if command == "clean":
        from lightning_shard.checkpoint.files.commit import clean_folder

        if "://" not in path and not Path(path).is_dir():
            raise UsageError(f"{path!r} is no folder.")
        done = "removed" if options["remove"] else "left behind (--remove removes it)"
        found = [f"{found} {done}" for found in clean_folder(path, **options)]
        return "\n".join(found) or f"nothing is left behind in {path}"
    if command == "inspect":
        from lightning_shard.checkpoint.inspect import describe, open_any

        return describe(path, open_any(path, optimizers="numbered"))
    from lightning_shard import tools

    if command == "verify":
        count = len(tools.verify(path))
        return f"{path} is whole: {count} file{'s' * (count != 1)} checked"
    if command == "export":
        return "\n".join(map(str, tools.export(path, **options)))
    written = tools.convert(path, **options)
    return f"{path} ({written.source_form}) -> {written.path} ({written.form})"
