"""``lightning-shard completion SHELL``: print a script by which bash or zsh completes commands, options and names."""

import argparse
import importlib
import inspect
from collections.abc import Sequence

from lightning_shard import registry
from lightning_shard.commands import COMMANDS, FIT
from lightning_shard.commands.options import KEYS, actions, options_parser
from lightning_shard.precision.words import PRECISIONS

_SCRIPT = """\
_lightning_shard() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words
  case $before in
{values}
    *) case $command in
{options}
    esac ;;
  esac
  if (( COMP_CWORD == 1 )); then words="{commands}"; fi
  COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
complete -o bashdefault -o default -F _lightning_shard lightning-shard
"""


def parser() -> argparse.ArgumentParser:
    parser = options_parser("completion", f"{COMMANDS['completion']} Its output belongs into ~/.bashrc or ~/.zshrc.")
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell")
    return parser


def main(arguments: Sequence[str]) -> int:
    shell = parser().parse_args(arguments).shell
    from lightning.pytorch import Trainer

    values = {"--trainer.strategy": list(registry.PRESETS), "--trainer.precision": list(PRECISIONS)}
    values["strategies"] = values["--to"] = values["--trainer.strategy"]
    trainer = [f"--trainer.{name}" for name in inspect.signature(Trainer).parameters if name != "self"]
    options = {name: _options(name) for name in COMMANDS}
    options["|".join(FIT)] = [*(f"--{name}" for name in ("config", "print_config", *KEYS)), *trainer]
    print("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "", end="")
    print(_SCRIPT.format(values=_cases(values, 4), options=_cases(options, 6), commands=" ".join([*FIT, *COMMANDS])))
    return 0


def _cases(words: dict[str, list[str]], indent: int) -> str:
    return "\n".join(f'{" " * indent}{case}) words="{" ".join(found)}" ;;' for case, found in words.items())


def _options(name: str) -> list[str]:
    found = actions(importlib.import_module(f"lightning_shard.commands.{name}").parser())
    choices = [str(word) for action in found if not action.option_strings for word in action.choices or ()]
    return choices + [option for action in found for option in action.option_strings if option.startswith("--")]
