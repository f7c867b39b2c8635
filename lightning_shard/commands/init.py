"""``lightning-shard init``: ask five questions and write one complete configuration with comments."""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from lightning_shard import registry
from lightning_shard.commands.options import UsageError, add_output, options_parser, refuse_to_replace, write_output
from lightning_shard.errors import ConfigurationError
from lightning_shard.precision.words import PRECISIONS
from lightning_shard.text import did_you_mean

_DEVICES = r"(?:([1-9]\d*) *x *)?([1-9]\d*) *(cpu|gpu)?"
QUESTIONS: Mapping[str, tuple[str, str]] = {
    "train": (
        "Which classes are trained? quickstart, or your own: package.Model,package.Data",
        r"quickstart|\w+(\.\w+)+(,\w+(\.\w+)+)?",
    ),
    "devices": ("On which devices? 8, or 2x8 on 2 nodes of 8, with gpu or cpu behind it", _DEVICES),
    "slurm": ("Does SLURM start it? yes or no", "yes|no"),
    "engine": ("Which strategy? a name of `lightning-shard strategies`", "|".join(registry.PRESETS)),
    "precision": (f"Which precision? {', '.join(PRECISIONS)}", "|".join(PRECISIONS)),
}
"""Name to question, and to the pattern of its answers."""

_DESCRIPTION = """\
Look at this machine, ask five things, and write one complete YAML with comments that trains as it is. --answers gives
them before (without a terminal the proposed answers hold for the rest), such as
  train=my.Model,my.Data devices=2x8 slurm=yes engine=shard_fsdp precision=bf16-mixed
"""


def parser() -> argparse.ArgumentParser:
    parser = options_parser("init", _DESCRIPTION)
    add = parser.add_argument
    add("--example", choices=["quickstart"], help="write this example's model, data and YAML, and ask nothing")
    add("--answers", nargs="+", default=[], metavar="FILE|NAME=VALUE", help=f"answers to {', '.join(QUESTIONS)}")
    add_output(parser, "file to write (default: run.yaml)", Path("run.yaml"))
    return parser


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    if options.example is not None:
        return _write_example(options.force)
    refuse_to_replace(options.output, options.force)
    found = _answers(options.answers)
    nodes, devices, accelerator = _machines(found)
    config = f"--config {shlex.quote(str(options.output))}"
    launch = f"lightning-shard fit {config}"
    if nodes > 1:
        launch = f"torchrun --nnodes {nodes} --nproc-per-node {devices} --rdzv-backend c10d --rdzv-endpoint NODE:29500 "
        launch += f"-m lightning_shard fit {config}    # on each node, NODE is the name of one of them"
    if found["slurm"] == "yes":
        launch = f"lightning-shard slurm {config} --submit"
    values = {"launch": launch, "nodes": nodes, "devices": devices, "accelerator": accelerator}
    values |= {"strategy": found["engine"], "precision": found["precision"], "modules": _modules(found["train"])}
    text = Template(Path(__file__).with_name("init.yaml").read_text(encoding="utf-8").rstrip("\n")).substitute(values)
    from lightning_shard.commands.migrate import check_result

    check_result(yaml.safe_load(text))
    write_output(options.output, text, options.force)
    print(f"written to {options.output}; train with: {launch}")
    return 0


def _machines(found: Mapping[str, str]) -> tuple[int, int, str]:
    """Return nodes, devices of each, and the accelerator: ``gpu`` if SLURM or several nodes run it, else this one's."""
    from lightning_shard.devices import visible

    copies, count, device = re.fullmatch(_DEVICES, found["devices"]).groups()  # type: ignore[union-attr]
    elsewhere = found["slurm"] == "yes" or int(copies or 1) > 1
    return int(copies or 1), int(count), device or ("gpu" if elsewhere or visible() else "cpu")


def _proposed(name: str, found: Mapping[str, str]) -> str:
    """Return the default answer, given the earlier answers."""
    from lightning_shard.devices import visible

    if name == "devices":
        return f"{visible()} gpu" if visible() else "8 gpu" if shutil.which("sbatch") else "2 cpu"
    if name == "precision":
        return "bf16-mixed" if _machines(found)[2] == "gpu" else "32-true"
    slurm = "yes" if shutil.which("sbatch") else "no"
    return {"train": "quickstart", "slurm": slurm, "engine": "shard_fsdp_aligned"}[name]


def _write_example(force: bool) -> int:
    """Write the quickstart's files into the working directory, from the wheel or the checkout."""
    package = Path(__file__).parents[1]
    shipped, checkout = package / "quickstart", package.parent
    sources = {"quickstart.yaml": "configs", "gpt.py": "examples", "python_corpus.py": "examples"}
    for name in sources:
        refuse_to_replace(Path(name), force)
    for name, folder in sources.items():
        source = shipped / name if shipped.is_dir() else checkout / folder / name
        text = source.read_text(encoding="utf-8").replace("examples.", "").replace("configs/", "")
        write_output(Path(name), text, force)
    print(f"written: {', '.join(sources)}; train with: lightning-shard fit --config quickstart.yaml")
    return 0


def _answers(given: Sequence[str]) -> dict[str, str]:
    """Return all answers: given, typed or proposed."""
    from lightning_shard.engines.zero.config.reading import read_file

    answers: dict[str, Any] = {}
    for answer in given:
        name, equals, value = answer.partition("=")
        answers |= {name: value} if equals else read_file(Path(answer))
    if unknown := answers.keys() - QUESTIONS:
        raise ConfigurationError(f"there is no question {', '.join(unknown)}. They are {', '.join(QUESTIONS)}.")
    for name, (question, pattern) in QUESTIONS.items():
        default = _proposed(name, answers)
        asks = name not in answers and sys.stdin.isatty()
        while True:
            answer = _typed(f"{question} [{default}] ") or default if asks else answers.get(name, default)
            # YAML reads an unquoted yes as true.
            answer = ("yes" if answer else "no") if isinstance(answer, bool) else str(answer)
            answers[name] = answer
            if re.fullmatch(pattern, answer):
                break
            near = did_you_mean(answer, pattern.split("|"))
            wrong = f"{name} is {answer!r}, which is no answer. {question}.{near}"
            if not asks:
                raise ConfigurationError(wrong)
            print(wrong)
    return answers


def _typed(question: str) -> str:
    try:
        return input(question).strip()
    except EOFError as error:
        raise UsageError("the input ended before the last answer, so nothing was written. Give --answers.") from error


def _modules(train: str) -> str:
    if train == "quickstart" and Path("examples/gpt.py").is_file():
        train = "examples.gpt.GPT,examples.python_corpus.PythonCorpus"
    elif train == "quickstart":
        train = ",".join(f"lightning.pytorch.demos.boring_classes.Boring{kind}" for kind in ("Model", "DataModule"))
    return "".join(
        f"# init_args: `lightning-shard fit --{key}.help {path}`\n{key}:\n  class_path: {path}\n"
        for key, path in zip(("model", "data"), train.split(","), strict=False)
    )
