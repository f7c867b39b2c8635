"""Whether SLURM started the processes that the Trainer counts on: pure functions over the job's facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_shard.cluster.slurm import SlurmJob, expand_nodes
from lightning_shard.errors import ConfigurationError

# Lightning takes jobs of these names for shells, in which it starts the processes itself.
_SHELLS = ("bash", "interactive")
_FIRST_PORT, _PORTS = 15000, 17000  # below the ports that systems give to outgoing connections


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the Trainer counts on."""

    nodes: int  # ``num_nodes``.
    devices: int  # Processes on each node.
    # Who starts the processes: ``"slurm"``, ``"torchrun"``, or anything else (Lightning itself, MPI, ...).
    launcher: str
    gpu: bool  # Whether a device is a GPU.


def check_launch(job: SlurmJob | None, launch: Launch, environ: Mapping[str, str]) -> None:
    """Compare the job with the Trainer's settings; no communication, and the same on every process of a step.

    A ConfigurationError names both numbers and the line of the batch script, or the setting, to change.
    """
    port = environ.get("MASTER_PORT", "29500")
    if not (port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigurationError(f"MASTER_PORT is {port!r}, but must be a port, from 1 to 65535: set another, or none.")
    if job is None:
        return
    wanted = f"--nodes={launch.nodes} --ntasks-per-node={launch.devices}"
    if launch.launcher not in ("slurm", "torchrun"):
        _check_own_launcher(job, launch, wanted)
        return
    if not job.uses_srun:
        # A torchrun in the batch script itself, or from a shell on each node, has counted its processes.
        if launch.launcher == "slurm" and launch.nodes * launch.devices > 1:
            raise ConfigurationError(
                f"SLURM job {job.label} runs this process without srun, so that it would wait for "
                f"{launch.nodes * launch.devices - 1} others that nobody starts. Write `srun` before the command in "
                f"the batch script, with #SBATCH {wanted}."
            )
        return
    _check_numbers(job, launch, wanted)
    _check_gpus(job, launch, environ)


def _check_own_launcher(job: SlurmJob, launch: Launch, wanted: str) -> None:
    tasks = job.tasks or 1
    if job.uses_srun and tasks > 1:
        reason = (
            f"its name is {job.name!r}, which Lightning takes for a shell, and so each of its {tasks} tasks would "
            "start processes of its own. Name it otherwise (#SBATCH --job-name=train)"
            if job.name in _SHELLS
            else f"each of its {tasks} tasks would start processes of its own. Start one task (srun --ntasks=1), or "
            "let SLURM start all processes and remove the cluster environment from the Trainer's plugins"
        )
        raise ConfigurationError(f"SLURM job {job.label}: {reason}; it needs {wanted}.")
    if launch.nodes > 1 and job.name in _SHELLS:
        raise ConfigurationError(
            f"num_nodes is {launch.nodes}, but SLURM job {job.label} is named {job.name!r}, which Lightning takes for "
            f"a shell on one node. Name it otherwise, and start it with srun {wanted}."
        )


def _check_numbers(job: SlurmJob, launch: Launch, wanted: str) -> None:
    if job.nodes is not None and job.nodes != launch.nodes:
        raise ConfigurationError(
            f"num_nodes is {launch.nodes}, but SLURM runs this step on {job.nodes} "
            f"{'node' if job.nodes == 1 else 'nodes'} ({job.node_list}). Set #SBATCH --nodes={launch.nodes}, or "
            f"num_nodes: {job.nodes}."
        )
    if job.tasks_per_node is None:
        return
    tasks = 1 if launch.launcher == "torchrun" else launch.devices
    for node, count in enumerate(job.tasks_per_node):
        if count == tasks:
            continue
        if launch.launcher == "torchrun":
            raise ConfigurationError(
                f"SLURM runs {count} tasks on node {node} of the step, each of them a torchrun that starts "
                f"{launch.devices} processes. Set #SBATCH --ntasks-per-node=1 for torchrun."
            )
        raise ConfigurationError(
            f"devices is {launch.devices}, but SLURM runs {count} {'task' if count == 1 else 'tasks'} on node {node} "
            f"of the step. Set #SBATCH --ntasks-per-node={launch.devices} (one for each device), or devices: {count}."
        )


def _check_gpus(job: SlurmJob, launch: Launch, environ: Mapping[str, str]) -> None:
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    if launch.gpu and gpus.isdigit() and int(gpus) < launch.devices:
        raise ConfigurationError(
            f"devices is {launch.devices}, but SLURM gave job {job.label} {gpus} GPUs on this node. Set "
            f"#SBATCH --gpus-per-node={launch.devices}, or devices: {gpus}."
        )


def meeting_point(job: SlurmJob | None, launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """``MASTER_ADDR`` and ``MASTER_PORT`` of this step, where SLURM starts the processes and the user gave none.

    The first node of the step (Lightning takes that of the job), and a port that no other step or job has: one of
    17,000, by job and step.
    """
    if job is None or launch.launcher != "slurm" or not job.uses_srun:
        return {}
    nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST", job.node_list))
    step = int(job.step) if job.step is not None and job.step.isdigit() else 0
    number = int(job.id) if job.id.isdigit() else 0
    found = {"MASTER_PORT": str(_FIRST_PORT + (number * 131 + step) % _PORTS)}
    if nodes:
        found["MASTER_ADDR"] = nodes[0]
    return {name: value for name, value in found.items() if name not in environ}
