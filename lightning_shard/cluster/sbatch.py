"""The text of a batch script that starts a training run the way it has to be started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_shard.errors import ConfigurationError

_TORCHRUN_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What the script asks SLURM for, and what it runs."""

    command: Sequence[str]  # Program and arguments of one process, without a launcher.
    nodes: int = 1  # Nodes of the job.
    devices: int = 1  # Processes on each node, one for each device.
    gpus: bool = True  # Whether a device is a GPU.
    cpus_per_task: int | None = None  # CPUs of each process; default: the cluster's.
    time: str | None = None  # Time limit, such as ``4:00:00``; default: the partition's.
    signal: str = "USR1"  # Signal that SLURM sends before the time limit.
    signal_seconds: int = 120  # How long before the time limit that is.
    # ``srun``: one task for each process; ``torchrun``: one torchrun on each node, which starts the processes.
    launcher: Literal["srun", "torchrun"] = "srun"
    torchrun: str = "torchrun"  # Path of torchrun.
    max_restarts: int = 0  # How often torchrun starts all processes again after a failure.
    name: str = "train"  # Name of the job.
    array: str | None = None  # Array of jobs, such as ``0-7%2``.
    # Folder of the job's output, made before the job starts; one file for each job or array task.
    logs: str = "slurm-logs"
    requeue: bool = True  # Whether the job may be put back into the queue.
    options: Sequence[str] = ()  # Further options of ``sbatch``, such as ``--partition=gpu``, one line each.
    # Variables of the processes, such as ``NCCL_SOCKET_IFNAME``.
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: Sequence[str] = ()  # Lines that are run before the command, such as ``source .venv/bin/activate``.

    def __post_init__(self) -> None:
        """Refuse what SLURM or Lightning would take for something else."""
        for name in ("nodes", "devices", "signal_seconds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be 1 or more.")
        if self.name in ("bash", "interactive"):
            raise ConfigurationError(f"name is {self.name!r}, which Lightning takes for a shell. Choose another.")
        if self.time is not None and not re.fullmatch(r"\d+(-\d+(:\d+){0,2})?|\d+(:\d+){1,2}|\d+", self.time):
            raise ConfigurationError(f"time is {self.time!r}, but must be minutes, H:MM:SS or D-H:MM:SS.")
        for name in ("name", "array", "logs"):
            if not (getattr(self, name) or "-").isprintable():
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}, but must be one line without tabs.")
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                raise ConfigurationError(f"sbatch option {option!r} must be one that sbatch has, such as --qos=high.")
        if self.max_restarts and self.launcher != "torchrun":
            raise ConfigurationError(
                f"max_restarts is {self.max_restarts}, but only the launcher torchrun starts processes again: choose "
                "it, or leave restarts to SLURM's queue."
            )


def script(job: BatchJob) -> str:
    """The batch script."""
    tasks = 1 if job.launcher == "torchrun" else job.devices
    options: list[str | None] = [
        # sbatch reads quotes in these lines as a shell does.
        f"--job-name={shlex.quote(job.name)}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--gpus-per-node={job.devices}" if job.gpus else None,
        f"--cpus-per-task={_cpus(job)}" if job.cpus_per_task else None,
        f"--time={job.time}" if job.time else None,
        f"--array={shlex.quote(job.array)}" if job.array else None,
        # To the processes, not to this script; the run saves itself and goes back into the queue.
        f"--signal={job.signal}@{job.signal_seconds}",
        "--requeue" if job.requeue else "--no-requeue",
        "--open-mode=append",
        f"--output={shlex.quote(job.logs)}/%x-{'%A_%a' if job.array else '%j'}.log",
        *job.options,
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options if option is not None), ""]
    lines += ["set -euo pipefail", *job.setup]
    if job.cpus_per_task:
        lines.append(f"export SRUN_CPUS_PER_TASK={_cpus(job)}  # srun does not take it from sbatch since SLURM 22.05")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    return "\n".join([*lines, "", *_launch(job)]) + "\n"


def _cpus(job: BatchJob) -> int:
    assert job.cpus_per_task is not None
    return job.cpus_per_task * (job.devices if job.launcher == "torchrun" else 1)


def _launch(job: BatchJob) -> list[str]:
    command = shlex.join(job.command)
    # A task that fails ends the step, so that the job ends with it.
    srun = "srun --kill-on-bad-exit=1"
    if job.launcher == "srun":
        return [f"{srun} {command}"]
    # torchrun's own agents are what SLURM signals; they pass the signal on.
    signals = f"{_TORCHRUN_SIGNALS},SIG{job.signal.removeprefix('SIG')}"
    return [
        # torchrun kills after that time; half a minute by itself, in which a long step and a save have no room.
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.signal_seconds}",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((15000 + SLURM_JOB_ID % 17000))",
        f"{srun} {shlex.quote(job.torchrun)} --nnodes={job.nodes} --nproc-per-node={job.devices} \\",
        f"    --max-restarts={job.max_restarts} \\",
        '    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID" \\',
        f"    --signals-to-handle={signals} \\",
        f"    {_as_module(job.command)}",
    ]


def _as_module(command: Sequence[str]) -> str:
    """The command as torchrun takes it: a script, or ``-m`` and a module."""
    if command[0].rpartition("/")[2] == "lightning-shard":
        return shlex.join(["-m", "lightning_shard", *command[1:]])
    if command[0].rpartition("/")[2].startswith("python"):
        return shlex.join(command[1:])
    return shlex.join(command)
