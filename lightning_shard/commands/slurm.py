"""``lightning-shard slurm``: write the batch script of a run, or submit it."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_shard.cluster.slurm_job import parse_time
from lightning_shard.commands import FIT, config_files, option_values
from lightning_shard.commands import options as common
from lightning_shard.errors import ConfigurationError, raise_problems
from lightning_shard.text import parse_count

_SIGNAL = "USR1"  # SLURM sends it before the time limit.
_PROGRAMS = os.path.dirname(sys.executable)  # the folder of this environment's programs


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield options that SLURM or Lightning would misread."""
    counts = re.fullmatch(r"([1-9]\d*)(?:-(\d+))?", options.nodes)
    if counts is None or int(counts[2] or counts[1]) < int(counts[1]):
        yield f"nodes is {options.nodes}, but must be 1 or more, or a range such as 2-4"
    if options.name in ("bash", "interactive"):
        yield f"name is {options.name!r}, which Lightning takes for a shell. Choose another"
    limit = 0.0 if options.time is None else parse_time(options.time)
    if limit is None:
        yield f"time is {options.time!r}, but must be minutes, H:MM:SS or D-H:MM:SS"
    elif 0 < limit <= options.signal_seconds + 60:  # SLURM signals up to a minute early, and counts no limit as 0.
        yield (
            f"time is {options.time}, but the signal to save comes signal_seconds ({options.signal_seconds} s) before "
            "its end, or a minute earlier: the job would be stopped as it starts, again and again. Give more time, or "
            "fewer --signal-seconds"
        )
    if options.max_restarts and options.launcher != "torchrun":
        rule = "only the launcher torchrun starts processes again: choose it, or leave restarts to SLURM's queue"
        yield f"max_restarts is {options.max_restarts}, but {rule}"
    for setting in options.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", setting, re.DOTALL):
            yield f"--env {setting!r} must have the form NAME=VALUE, the name in plain letters"


def script(options: argparse.Namespace, command: Sequence[str]) -> str:
    """Return the batch script of ``command``, the program and arguments of one process without its launcher."""
    raise_problems([*_problems(options)])
    torchrun = options.launcher == "torchrun"
    cpus = (options.cpus_per_task or 0) * (options.devices if torchrun else 1)
    tasks = f"--ntasks-per-node={1 if torchrun else options.devices}"
    # With one task per node sbatch starts the fewest nodes of a range.
    later = "-" in options.nodes and tasks.endswith("=1")
    named = {name: getattr(options, name) for name in ("time", "array", "partition", "account")}
    lines: list[str | None] = [
        f"--job-name={_quoted(options.name)}",
        f"--nodes={options.nodes}",
        None if later else tasks,
        None if options.cpu else f"--gpus-per-node={options.devices}",
        f"--cpus-per-task={cpus}" if cpus else None,
        *(f"--{name}={_quoted(value)}" if value else None for name, value in named.items()),
        # Sent to the processes, not to this script. The run saves itself and goes back into the queue.
        f"--signal={_SIGNAL}@{options.signal_seconds}",
        "--no-requeue" if options.no_requeue else "--requeue",
        "--open-mode=append",
        f"--output={_quoted(options.logs)}/%x-{'%A_%a' if options.array else '%j'}.log",
        *options.sbatch,
    ]
    text = ["#!/bin/bash", *(f"#SBATCH {line}" for line in lines if line is not None), ""]
    # Not -u: activation scripts read unset variables.
    text += ["set -eo pipefail", *options.setup]
    if cpus:
        text.append(f"export SRUN_CPUS_PER_TASK={cpus}  # srun does not take it from sbatch since SLURM 22.05")
    # Without SLURM_EXPORT_ENV=ALL the steps would see none of these under sbatch --export=NONE.
    environment: dict[str, str] = {"PYTHONUNBUFFERED": "1", "SLURM_EXPORT_ENV": "ALL"}
    environment |= {"NCCL_DEBUG": options.nccl_debug} if options.nccl_debug else {}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if options.socket_interface else ():
        environment[name] = options.socket_interface
    environment |= dict(setting.split("=", 1) for setting in options.env)
    text += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    # A failed task ends the step, and with it the job.
    srun = "srun --kill-on-bad-exit=1" + f" {tasks}" * later
    if not torchrun:
        return "\n".join([*text, "", f"{srun} {_joined(command)}"]) + "\n"
    program = os.path.basename(command[0])  # torchrun runs a script, or -m and a module
    command = ["-m", "lightning_shard", *command[1:]] if program == "lightning-shard" else command
    command = command[1:] if program.startswith("python") else command
    text += [
        "",
        # torchrun kills after this time, by default 30 s, which is too short for a long step and a save.
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={options.signal_seconds}",
        # Not `head`: it would end before scontrol has written thousands of names, and pipefail would end the script.
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "port=$((15000 + SLURM_JOB_ID % 17000))",
        f"{srun} {shlex.quote(shutil.which('torchrun', path=_PROGRAMS) or 'torchrun')} --nnodes={_nodes_of(options)} "
        f"--nproc-per-node={options.devices} \\",
        f"    --max-restarts={options.max_restarts} \\",
        '    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID" \\',
        # SLURM signals torchrun's agents, which pass the signal on.
        f"    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIG{_SIGNAL} \\",
        f"    {_joined(command)}",
    ]
    return "\n".join(text) + "\n"


def _quoted(value: str) -> str:
    """Quote a word for an ``#SBATCH`` line. sbatch reads quotes as a shell does, but a backslash escapes the next
    character in any quotes (``_get_argument`` in SLURM's ``src/sbatch/opt.c``).
    """
    return shlex.quote(value).replace("\\", "\\\\")


def _nodes_of(options: argparse.Namespace) -> str:
    """Return the number of nodes for the script. Of a range, SLURM gives another number at each start."""
    return "$SLURM_JOB_NUM_NODES" if "-" in options.nodes else str(options.nodes)


def _joined(command: Sequence[str]) -> str:
    """Quote a command for the shell, which fills in the number of nodes."""
    number = "--trainer.num_nodes=$SLURM_JOB_NUM_NODES"
    return " ".join(f'"{word}"' if word == number else shlex.quote(word) for word in command)


_DESCRIPTION = """\
Write a SLURM batch script of a run to stdout or --output; with --submit, submit it. Other options are the
options of the command: lightning-shard slurm --nodes 2 --devices 4 --config run.yaml --trainer.max_steps 1000

The run resumes from its own newest checkpoint whenever it is started (ckpt_path: auto), saves itself before the time
limit and when it is preempted, and goes back into the queue then.
"""


def parser() -> common.OptionsParser:
    parser = common.options_parser("slurm", _DESCRIPTION)
    add = parser.add_argument
    add("--nodes", help="nodes of the job, or the fewest and the most that it may have: 2-4 (default: num_nodes, or 1)")
    add("--devices", type=common.count, help="devices, so processes, of each node (default: the configuration's, or 1)")
    add("--cpu", action="store_true", help="devices are CPUs: ask for no GPUs (default: by trainer.accelerator)")
    add("--cpus-per-task", type=common.count, help="CPUs of each process (default: the cluster's)")
    add("--time", help="time limit, such as 4:00:00 (default: the partition's)")
    add("--signal-seconds", type=common.count, default=120, help="signal it so long before the limit (default: 120)")
    add("--launcher", choices=["srun", "torchrun"], default="srun", help="who starts the processes (default: srun)")
    add("--max-restarts", type=int, default=0, help="restarts by torchrun after a failure (default: 0)")
    add("--name", default="train", help="name of the job (default: train)")
    add("--array", help="array of jobs, such as 0-7")
    add("--logs", default="slurm-logs", help="folder of the logs (default: slurm-logs)")
    add("--no-requeue", action="store_true", help="do not put the job back into the queue")
    add("--partition", help="partition of the job")
    add("--account", help="account that the job is billed to")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="further option of sbatch: --sbatch=--qos=high")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of the processes")
    add("--nccl-debug", metavar="LEVEL", help="NCCL_DEBUG: WARN, INFO, ...")
    add("--socket-interface", metavar="NAME", help="network interface of NCCL and gloo, such as ib0")
    add("--setup", action="append", default=[], metavar="LINE", help="line to run before, such as 'module load cuda'")
    add("--command", default="fit", choices=[*FIT], help="command to run (default: fit)")
    common.add_output(parser, "file to write the script to (default: stdout)")
    add("--submit", action="store_true", help="submit it with sbatch")
    return parser


def parse_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, with the machines that the run's configuration names, and the arguments of its command.

    ConfigurationError: the two contradict each other, or the job would refuse an argument.
    """
    options, rest = parser().parse_known_args(arguments)
    config = _configuration(rest)
    check_rest(options.command, rest)
    trainer: dict[str, Any] = config.get("trainer") or {}
    trainer |= {
        name.removeprefix("--trainer."): value for name, value in option_values(rest) if name.startswith("--trainer.")
    }
    nodes, devices, accelerator = (trainer.get(key) for key in ("num_nodes", "devices", "accelerator"))
    if devices is not None and not parse_count(devices) and options.devices is None:
        raise ConfigurationError(f"trainer.devices is {devices}, but a job says how many it asks for: give --devices.")
    least, _, most = (options.nodes or str(nodes)).partition("-")
    if parse_count(nodes) and not parse_count(least) <= parse_count(nodes) <= parse_count(most or least):
        raise _contradiction(f"--nodes {options.nodes}", f"trainer.num_nodes: {nodes}")
    if options.devices and parse_count(devices) not in (0, options.devices):
        raise _contradiction(f"--devices {options.devices}", f"trainer.devices: {devices}")
    if options.cpu and accelerator not in (None, "auto", "cpu"):
        raise _contradiction("--cpu", f"trainer.accelerator: {accelerator}")
    options.nodes = options.nodes or str(parse_count(nodes) or 1)
    options.devices = (parse_count(devices) or 1) if options.devices is None else options.devices
    options.cpu = options.cpu or accelerator == "cpu"
    # A run with a ckpt_path starts from it, and resumes from its own checkpoint only after a requeue then.
    options.auto = (
        options.command == "fit" and not config.get("ckpt_path") and "--ckpt_path" not in dict(option_values(rest))
    )
    return options, rest


def _contradiction(option: str, setting: str) -> ConfigurationError:
    return ConfigurationError(f"{option} contradicts {setting} of the configuration: make them equal, or remove one.")


def _configuration(rest: Sequence[str]) -> dict[str, Any]:
    """Read the ``--config`` files. Later files replace keys of earlier ones, and their ``trainer`` sections merge."""
    import yaml

    content: dict[str, Any] = {}
    for file in config_files(rest):
        if not Path(file or "-").is_file():
            raise ConfigurationError(f"--config {file}: there is no such file (from {Path.cwd()}).")
        try:
            read = yaml.safe_load(Path(file).read_text(encoding="utf-8", errors="replace")) or {}
        except yaml.YAMLError as error:
            raise ConfigurationError(f"--config {file} can't be read as YAML: {error}") from error
        trainers = [part.get("trainer") for part in (content, read) if isinstance(part, dict)]
        merged = {key: value for each in trainers if isinstance(each, dict) for key, value in each.items()}
        content |= {**(read if isinstance(read, dict) else {}), "trainer": merged}
    return content


def command_of(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Return program and arguments of each process. ``rest``: arguments of the command."""
    # With its path, so that the job finds it without an activated environment.
    own = shutil.which("lightning-shard", path=_PROGRAMS)
    installed = [own] if own is not None else [sys.executable, "-m", "lightning_shard"]
    program = [sys.executable, sys.argv[0]] if _is_script() else installed
    command = [*program, options.command, *rest]
    command += [f"--trainer.num_nodes={_nodes_of(options)}", f"--trainer.devices={options.devices}"]
    return command + ["--trainer.accelerator=cpu"] * options.cpu + ["--ckpt_path=auto"] * options.auto


_KEYS = ("config", *common.KEYS, "verbose", "return_predictions", "print_config", "traceback")
"""Options of the command, without anything after their first dot."""


def check_rest(command: str, rest: Sequence[str]) -> None:
    """Refuse unknown options before the job waits in the queue. A user's own script may have more of them."""
    known = [f"--{key}" for key in _KEYS]
    for word in rest:
        name = word.partition("=")[0].partition(".")[0].rstrip("+")
        if word.startswith("--") and name not in known and not _is_script():
            raise ConfigurationError(parser().unknown(word, known).replace("slurm.", f"slurm, nor of {command}.", 1))
    if not (config_files(rest) or _is_script() or any(word.startswith("--model") for word in rest)):
        raise ConfigurationError(f"{command} has nothing to run: give --config FILE, or --model.")


def _is_script() -> bool:
    return sys.argv[0].endswith(".py") and Path(sys.argv[0]).name != "__main__.py"


def main(arguments: Sequence[str]) -> int:
    options, rest = parse_options(arguments)
    text = script(options, command_of(options, rest))
    if options.submit and shutil.which("sbatch") is None:
        raise ConfigurationError("--submit needs sbatch, which is not on this machine: run it on a login node.")
    if options.output is not None:
        common.write_output(options.output, text, options.force)
    elif not options.submit:
        sys.stdout.write(text)
        return 0
    # SLURM makes no folders, and a job whose log can't be written fails without a word.
    os.makedirs(options.logs, exist_ok=True)
    return subprocess.run(["sbatch"], input=text, text=True, check=False).returncode if options.submit else 0
