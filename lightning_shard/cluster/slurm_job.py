"""A SLURM job: its facts from an environment that is passed in, its launch, its time left, and requeueing."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_shard.errors import ConfigurationError

COMMAND_SECONDS = 30.0  # Timeout of SLURM's commands. A busy controller answers late, a dead one never.


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """One process of a job, as SLURM started it (https://slurm.schedmd.com/srun.html, "output environment")."""

    id: str  # ``SLURM_JOB_ID``, another number for each array task.
    array_id: str | None  # ``SLURM_ARRAY_JOB_ID``, or None outside an array.
    array_task: str | None  # ``SLURM_ARRAY_TASK_ID``, or None outside an array.
    step: str | None  # ``SLURM_STEP_ID``, the number of the ``srun`` in its job, or None in the batch script itself.
    name: str  # ``SLURM_JOB_NAME``.
    restarts: int  # ``SLURM_RESTART_COUNT``, the number of requeues.
    nodes: int | None  # Nodes of the step, else of the job.
    tasks: int | None  # Tasks of the step, or of the job without ``srun``.
    tasks_per_node: tuple[int, ...] | None  # Tasks on each node of the step.
    node_list: str  # ``SLURM_JOB_NODELIST``, such as ``gpu[01-04]``.
    rank: int | None  # ``SLURM_PROCID``.

    @property
    def label(self) -> str:
        """The job as SLURM's commands take it: ``12``, or ``12_3`` of an array, whose last task has the array's id."""
        return self.id if self.array_id is None else f"{self.array_id}_{self.array_task}"

    @property
    def uses_srun(self) -> bool:
        """Whether this process is a task of a job step, not a line of the batch script."""
        return self.step is not None and self.rank is not None


def read_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """The job that this process belongs to, or None outside SLURM."""
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None
    step = environ.get("SLURM_STEP_ID")
    prefix = "SLURM_STEP_" if step is not None and "SLURM_STEP_NUM_TASKS" in environ else "SLURM_"
    per_node = environ.get(f"{prefix}TASKS_PER_NODE")
    return SlurmJob(
        id=job,
        array_id=environ.get("SLURM_ARRAY_JOB_ID"),
        array_task=environ.get("SLURM_ARRAY_TASK_ID"),
        step=step,
        name=environ.get("SLURM_JOB_NAME", ""),
        restarts=_number(environ, "SLURM_RESTART_COUNT") or 0,
        nodes=_number(environ, f"{prefix}NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        tasks=_number(environ, f"{prefix}NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        tasks_per_node=None if per_node is None else expand_counts(per_node),
        node_list=environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", "")),
        rank=_number(environ, "SLURM_PROCID"),
    )


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def expand_counts(text: str) -> tuple[int, ...] | None:
    """``(4, 4, 2)`` of SLURM's ``4(x2),2``, or None of another form."""
    counts = re.sub(r"(\d+)\(x(\d+)\)", lambda found: ",".join([found[1]] * int(found[2])), text).split(",")
    return tuple(map(int, counts)) if all(map(str.isdigit, counts)) else None


def first_node(text: str) -> str:
    """``b08`` of ``b[08-09],c1``: the first of each bracket."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", text).partition(",")[0]


def parse_time(text: str) -> float | None:
    """Seconds of ``1-02:03:04``, ``1-02``, ``02:03:04``, ``3:04`` or minutes alone. None of others (``UNLIMITED``)."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = ([*parts, 0, 0] if days else [0, *parts, 0] if len(parts) < 3 else parts)[:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def time_left(job: SlurmJob) -> float | None:
    """Seconds until SLURM ends the job. None without a limit or an answer."""
    code, output = _run("squeue", "--noheader", "--jobs", job.label, "--format", "%L")
    lines = output.split()
    return parse_time(lines[0]) if code == 0 and lines else None


def is_cancelled(job: SlurmJob) -> bool:
    """Whether SLURM ends the job before its time is up, for ``scancel`` or to requeue it by itself."""
    code, output = _run("scontrol", "show", "job", "--oneliner", job.label)
    return code == 0 and shows_cancelled(output)


def shows_cancelled(text: str) -> bool:
    """`is_cancelled` by the output of ``scontrol show job``. A job that ends is COMPLETING for any cause."""
    shown = dict(word.split("=", 1) for word in text.split() if "=" in word)
    if shown.get("JobState") not in ("COMPLETING", "CANCELLED"):
        return False
    limit, run = parse_time(shown.get("TimeLimit", "")), parse_time(shown.get("RunTime", ""))
    return limit is None or run is None or run < limit


def requeue(job: SlurmJob) -> str | None:
    """Put the job back into the queue. SLURM then ends its processes. Returns None, or the reason for a refusal."""
    code, output = _run("scontrol", "requeue", job.label)
    # Below 0: the requeue itself ended the command, which belongs to the job.
    return None if code <= 0 else output


def _run(*command: str) -> tuple[int, str]:
    """Exit code (below 0: ended by a signal) and output, or stderr after a failure."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, f"{command[0]}: {error}"
    return run.returncode, (run.stdout if run.returncode == 0 else run.stderr).strip()


# Lightning takes jobs of these names for shells and starts the processes itself.
_SHELLS = ("bash", "interactive")
_FIRST_PORT, _PORTS = 15000, 17000  # below the ports that systems give to outgoing connections


@dataclass(frozen=True, kw_only=True)
class Launch:
    nodes: int  # ``num_nodes``.
    devices: int  # Processes on each node.
    launcher: str  # Starts the processes: ``"slurm"``, ``"torchrun"``, or anything else (Lightning itself, MPI, ...).
    gpu: bool  # Whether a device is a GPU.


def check_launch(job: SlurmJob | None, launch: Launch, environ: Mapping[str, str]) -> None:
    """Compare the Trainer's settings with the job. The same ConfigurationError on every process names the fix."""
    port = environ.get("MASTER_PORT", "29500")
    if not (port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigurationError(f"MASTER_PORT is {port!r}, but must be a port, from 1 to 65535. Set another, or none.")
    if job is None:
        return
    own_launcher = launch.launcher not in ("slurm", "torchrun")
    shell = own_launcher and job.name in _SHELLS
    advice = f" Name it otherwise than {job.name!r}, which Lightning takes for a shell." if shell else ""
    if not job.uses_srun:
        # A torchrun in the batch script or in a shell on each node has counted its processes.
        if (shell and launch.nodes > 1) or (launch.launcher == "slurm" and launch.nodes * launch.devices > 1):
            raise ConfigurationError(
                f"SLURM job {job.label} runs this process without srun, so that it would wait for others that nobody "
                f"starts. Write `srun` before the command in the batch script, with #SBATCH --nodes={launch.nodes} "
                f"--ntasks-per-node={launch.devices}.{advice}"
            )
        return
    # torchrun and Lightning start the processes of a node themselves.
    tasks = 1 if launch.launcher != "slurm" else launch.devices
    counts = set(job.tasks_per_node or ()) if not own_launcher else {job.tasks or 1}
    other_nodes = shell and launch.nodes > 1 if own_launcher else job.nodes not in (None, launch.nodes)
    if counts - {tasks} or other_nodes:
        raise ConfigurationError(
            f"SLURM runs {job.tasks} tasks of job {job.label} on {job.nodes} nodes ({job.node_list}), but num_nodes is "
            f"{launch.nodes} and devices is {launch.devices}, of which {launch.launcher} needs {tasks} tasks on each "
            f"node. Set #SBATCH --nodes={launch.nodes} --ntasks-per-node={tasks}, or num_nodes and devices.{advice}"
        )
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    if launch.gpu and not own_launcher and gpus.isdigit() and int(gpus) < launch.devices:
        raise ConfigurationError(
            f"devices is {launch.devices}, but SLURM gave job {job.label} {gpus} GPUs on this node. Set "
            f"#SBATCH --gpus-per-node={launch.devices}, or devices: {gpus}."
        )


def meeting_point(job: SlurmJob | None, launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """``MASTER_ADDR`` and ``MASTER_PORT`` that ``environ`` lacks: the step's first node and one of 17,000 ports."""
    if job is None or launch.launcher != "slurm" or not job.uses_srun:
        return {}
    node = first_node(environ.get("SLURM_STEP_NODELIST", job.node_list))
    step = int(job.step) if job.step is not None and job.step.isdigit() else 0
    number = int(job.id) if job.id.isdigit() else 0
    found = {"MASTER_PORT": str(_FIRST_PORT + (number * 131 + step) % _PORTS)}
    if node:
        found["MASTER_ADDR"] = node
    return {name: value for name, value in found.items() if name not in environ}
