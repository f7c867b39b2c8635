"""A real SLURM of a few virtual nodes on one machine, for the tests of the group ``slurm``.

Needs root and Debian's ``slurmctld slurmd slurm-client munge iproute2``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2")
PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "ip", "nsenter", "unshare")
LOCK = Path("/run/lightning-shard-slurm.lock")
NETWORK = "10.78.0"
BRIDGE = "lshbr0"
PORTS = (26817, 26818)
CPUS = 4

CONFIG = """\
ClusterName=lsh
SlurmctldHost=lshead({network}.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
KillWait=10
SlurmdTimeout=20
PropagateResourceLimits=NONE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""


def why_not() -> str | None:
    """What keeps a cluster from being started here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "starting a SLURM needs root"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"no {', '.join(missing)} here (apt-get install {' '.join(PACKAGES)})"
    probe = f"lshprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        return "network namespaces can't be made here"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class Cluster:
    """A running SLURM with nodes ``lsh1``, ``lsh2``, ...; a context manager."""

    def __init__(self, nodes: int = 3) -> None:
        self.names = [f"lsh{i + 1}" for i in range(nodes)]
        self.folder = Path(tempfile.mkdtemp(prefix="lsh-slurm-", dir="/tmp"))
        self.private = self.folder / "private"
        self.environ = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        # A job must not take the tests for the launcher of its own processes.
        for name in list(self.environ):
            if name.startswith(("SLURM_", "PYTEST_")) and name != "SLURM_CONF":
                del self.environ[name]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    # Up and down

    def __enter__(self) -> Cluster:
        """Start everything; returns when a job has run on every node."""
        self._lock = LOCK.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._remove_network()
            self._write_files()
            self._make_network()
            munge = self.folder / "munge"
            self._start(
                "munged",
                *("munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket"),
                *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
            )
            _wait(lambda: (munge / "socket").exists(), 20, "munged")
            self._start("slurmctld", "unshare", "--uts", "sh", "-c", "hostname lshead; exec slurmctld -D")
            for name in self.names:
                self.start_node(name)
            _wait(self._is_idle, 60, "the nodes", self.folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the jobs, the daemons and the namespaces."""
        if self._daemons.get("slurmctld"):
            self.cancel_all()
        for name in [*self.names, "slurmctld", "munged"]:
            self._stop(name)
        self._remove_network()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def start_node(self, name: str) -> None:
        """Start a node's slurmd in its namespaces."""
        setup = (
            f"hostname {name}; mount --bind {self.folder}/hosts /etc/hosts; "
            f"mount --bind {self.folder}/private-{name} {self.private}; exec slurmd -D -N {name}"
        )
        self._start(name, "nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c", setup)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ, start_new_session=True
            )

    def _stop(self, name: str) -> None:
        process = self._daemons.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _write_files(self) -> None:
        for name in ("state", "munge", "private", *(f"private-{node}" for node in self.names)):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        key = self.folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        lines = [
            f"NodeName={name} NodeAddr={NETWORK}.{10 + i} CPUs={CPUS} RealMemory=4000 State=UNKNOWN"
            for i, name in enumerate(self.names)
        ]
        text = CONFIG.format(folder=self.folder, network=NETWORK, ports=PORTS, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        hosts = ["127.0.0.1 localhost", f"{NETWORK}.1 lshead"]
        hosts += [f"{NETWORK}.{10 + i} {name}" for i, name in enumerate(self.names)]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")

    def _make_network(self) -> None:
        _ip(f"link add {BRIDGE} type bridge", f"addr add {NETWORK}.1/24 dev {BRIDGE}", f"link set {BRIDGE} up")
        for i, name in enumerate(self.names):
            # No default route: with one, a reverse look-up of an address waits for a name server out of reach.
            _ip(
                f"netns add {name}",
                f"link add {name}v type veth peer name eth0 netns {name}",
                f"link set {name}v master {BRIDGE} up",
                f"-n {name} addr add {NETWORK}.{10 + i}/24 dev eth0",
                f"-n {name} link set eth0 up",
                f"-n {name} link set lo up",
            )

    def _remove_network(self) -> None:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        for name in re.findall(r"^lsh\d+\b", listed, re.MULTILINE):
            _end_processes(name)
            # By hand: with its namespace it would go some time later.
            if Path(f"/sys/class/net/{name}v").exists():
                _ip(f"link del {name}v")
            _ip(f"netns del {name}")
        if Path(f"/sys/class/net/{BRIDGE}").exists():
            _ip(f"link del {BRIDGE}")

    def _is_idle(self) -> bool:
        idle = self.command("sinfo", "-h", "-r", "-N", "-t", "idle", "-o", "%N", check=False).split()
        return len(set(idle)) == len(self.names)

    # Jobs

    def command(self, *words: str, check: bool = True, environ: Mapping[str, str] | None = None) -> str:
        """Output of one of SLURM's commands, run on the machine itself."""
        environment = {**self.environ, **(environ or {})}
        run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        if check and run.returncode != 0:
            raise AssertionError(f"{' '.join(words)} failed: {run.stderr}{run.stdout}")
        return run.stdout

    def submit(self, script: Path, *options: str, cwd: Path | None = None) -> str:
        """Submit a batch script; its job id."""
        folder = [f"--chdir={cwd}"] if cwd else []
        return self.command("sbatch", "--parsable", *folder, *options, str(script)).strip()

    def cancel_all(self) -> None:
        """End all jobs and wait until they are gone."""
        self.command("scancel", "-u", "root", check=False)
        _wait(lambda: not self.command("squeue", "-h", check=False), 30, None)

    def describe(self) -> str:
        """Jobs and nodes, and the end of the controller's log."""
        shown = [self.command(*words.split(), check=False) for words in ("squeue -l", "sinfo -R", "sinfo -N -l")]
        return "\n".join([*shown, (self.folder / "slurmctld.log").read_text(errors="replace")[-2500:]])

    def state(self, job: str) -> str:
        """The job's state, such as RUNNING."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``, "" where there is none."""
        text = self.command("scontrol", "show", "job", "-o", job, check=False)
        found = re.search(rf"\b{name}=(\S+)", text)
        return found[1] if found else ""

    def wait(self, job: str, *states: str, seconds: float = 120) -> str:
        """Wait until the job is in one of the states; by default until it has ended for good. The state."""
        ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")
        wanted: Sequence[str] = states or ended
        _wait(lambda: self.state(job) in wanted, seconds, f"job {job} ({self.state(job)}, awaited {wanted})")
        return self.state(job)


def _end_processes(namespace: str) -> None:
    """What still runs in one of the tests' own network namespaces."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
    for pid in listed.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def _wait(condition: object, seconds: float, what: str | None, logs: Path | None = None) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            if what is None:
                return
            tails = [f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs.glob("*.log")] if logs else []
            raise AssertionError("\n".join([f"{what}: not after {seconds} s", *tails]))
        time.sleep(0.2)
