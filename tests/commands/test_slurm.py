"""The batch script that ``lightning-shard slurm`` writes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_shard import ConfigurationError
from lightning_shard.commands import slurm
from lightning_shard.commands.slurm import script
from tests.harness import ROOT

SRUN = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=4:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-logs/%x-%j.log
#SBATCH --qos=high

set -eo pipefail
module load cuda
export SRUN_CPUS_PER_TASK=8  # srun does not take it from sbatch since SLURM 22.05
export NCCL_SOCKET_IFNAME='ib0,ib1'

srun --kill-on-bad-exit=1 lightning-shard fit --config 'my run.yaml'
"""


def test_one_task_for_each_device() -> None:
    words = (
        "--nodes 2 --devices 4 --cpus-per-task 8 --time 4:00:00 --sbatch=--qos=high --env NCCL_SOCKET_IFNAME=ib0,ib1"
    )
    text = _job(
        *words.split(), "--setup=module load cuda", command=("lightning-shard", "fit", "--config", "my run.yaml")
    )
    assert text.replace("export PYTHONUNBUFFERED=1\nexport SLURM_EXPORT_ENV=ALL\n", "") == SRUN.replace(
        "'ib0,ib1'", "ib0,ib1"
    )


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_of_a_range_of_nodes_the_job_takes_what_the_queue_gave_it(launcher: str) -> None:
    text = _text("--nodes=2-4", f"--launcher={launcher}", "--model.name=a b")
    assert "#SBATCH --nodes=2-4\n" in text
    # Seen on SLURM 22.05: with one task per node in sbatch's options the job gets two nodes, whatever is free.
    assert "#SBATCH --ntasks" not in text
    assert "\nsrun --kill-on-bad-exit=1 --ntasks-per-node=1 " in text
    assert "#SBATCH --ntasks-per-node=8\n" in _text("--nodes=2-4", "--devices=8")
    assert """ '--model.name=a b' "--trainer.num_nodes=$SLURM_JOB_NUM_NODES" """ in text
    assert ("torchrun --nnodes=$SLURM_JOB_NUM_NODES " in text) == (launcher == "torchrun")


def test_words_with_spaces_are_quoted() -> None:
    lines = _job("--name=my run; touch a", "--logs=my logs", "--partition=a b", "--account=c;d").splitlines()
    assert {"#SBATCH --partition='a b'", "#SBATCH --account='c;d'"} <= {*lines}
    assert "#SBATCH --job-name='my run; touch a'" in lines
    assert "#SBATCH --output='my logs'/%x-%j.log" in lines
    # sbatch takes a backslash for its own in any quotes: this one would end the name and give it an option.
    assert r"""#SBATCH --job-name='\\'"'"'a'"'"' --nodes=9 '"'"''""" in _job("--name", r"\'a' --nodes=9 '").splitlines()
    with pytest.raises(ConfigurationError, match="max_restarts is 3, but only the launcher torchrun"):
        _job("--max-restarts=3")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model=M", "--node", "2"], r"--node is no option of slurm, nor of fit\. Did you mean --nodes"),
        (["--config", "nope.yaml"], r"--config nope.yaml: there is no such file"),
        (["--config=run.yaml", "--nodes=3"], r"--nodes 3 contradicts trainer.num_nodes: 2 of the configuration: make"),
        (["--config=run.yaml", "--devices=4"], r"--devices 4 contradicts trainer.devices: 8"),
        (["--config=run.yaml", "--cpu"], r"--cpu contradicts trainer.accelerator: gpu"),
        (["--config=auto.yaml"], r"trainer.devices is auto, but a job says how many it asks for: give --devices"),
        (["--config=broken.yaml"], r"--config broken.yaml can't be read as YAML"),
        (["--nodes=2"], r"fit has nothing to run: give --config FILE, or --model"),
        (["--trainr.max_steps", "2"], r"--trainr.max_steps is no option of slurm, nor of fit\. Did you mean --trainer"),
    ],
)
def test_mistakes_are_refused_before_the_queue(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-shard"])
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("trainer: {num_nodes: 2, devices: 8, accelerator: gpu}\n")
    Path("auto.yaml").write_text("trainer: {devices: auto}\n")
    Path("broken.yaml").write_text("trainer: {\n")
    with pytest.raises(ConfigurationError, match=expected):
        slurm.main(arguments)


def test_torchrun_is_one_task_on_each_node() -> None:
    words = "--nodes 2 --devices 4 --cpus-per-task 8 --launcher torchrun --array 0-3"
    lines = _job(*words.split(), command=("/env/bin/lightning-shard", "fit")).splitlines()
    for line in (
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=32",
        "#SBATCH --array=0-3",
        "#SBATCH --output=slurm-logs/%x-%A_%a.log",
        "    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \\",
        "    -m lightning_shard fit",
    ):
        assert line in lines
    # Else torchrun kills half a minute after the signal, whatever is being saved.
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120" in lines
    assert any(re.match(r"srun --kill-on-bad-exit=1 \S*torchrun --nnodes=2 --nproc-per-node=4", line) for line in lines)


def test_the_examples_are_what_the_command_writes() -> None:
    # The first command of the walk-through, as it stands there.
    walkthrough = (ROOT / "examples/README.md").read_text()
    written = re.search(r"^lightning-shard slurm (.*?)\nsbatch", walkthrough, re.DOTALL | re.MULTILINE)
    assert written is not None
    words = shlex.split(written[1].replace("\\\n", " "))
    for launcher, more in (("srun", []), ("torchrun", ["--launcher=torchrun", "--max-restarts=3"])):
        text = _text(*words, *more).replace("--model=M ", "")
        for program in ("lightning-shard", "torchrun"):
            text = re.sub(rf"\S*/{program} ", f"{program} ", text)
        assert (ROOT / f"examples/slurm/{launcher}.sbatch").read_text() == text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["--name=bash"], "takes for a shell"),
        (["--nodes=0"], "nodes is 0, but must be 1 or more, or a range such as 2-4"),
        (["--time=4h"], "must be minutes, H:MM:SS or D-H:MM:SS"),
        (["--time=2"], "the job would be stopped as it starts, again and again"),
        (["--time=0:05:00", "--signal-seconds=240"], "before its end, or a minute earlier"),
        (["--env=1A=2"], "must have the form NAME=VALUE"),
    ],
)
def test_jobs_that_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        _job(*settings)


def _text(*arguments: str) -> str:
    options, rest = slurm.parse_options(["--model=M", *arguments])
    return script(options, slurm.command_of(options, rest))


def _job(*arguments: str, command: Sequence[str] = ("x",)) -> str:
    return script(slurm.parse_options(["--model=M", *arguments])[0], command)


@pytest.mark.parametrize(
    ("trainer", "arguments", "expected"),
    [
        ("{num_nodes: 2, devices: 8}", [], (2, 8, True)),
        ("{num_nodes: 2, devices: '0,1', accelerator: cpu}", [], (2, 2, False)),
        ("{devices: [0, 3], accelerator: auto}", ["--cpu"], (1, 2, False)),
        ("{devices: auto, num_nodes: 2}", ["--devices=4", "--trainer.num_nodes=3"], (3, 4, True)),
        ("{num_nodes: 2}", ["--trainer.devices", "4", "--trainer.accelerator", "cpu"], (2, 4, False)),
        ("null", [], (1, 1, True)),
    ],
)
def test_the_machines_are_those_of_the_configuration(
    trainer: str, arguments: list[str], expected: tuple[int, int, bool], tmp_path: Path
) -> None:
    (tmp_path / "first.yaml").write_text("trainer: {num_nodes: 1, devices: 1}\n")
    (tmp_path / "run.yaml").write_text(f"trainer: {trainer}\n")
    first = ["--config", str(tmp_path / "first.yaml")] * (trainer != "null")
    text = _text(*first, "--config", str(tmp_path / "run.yaml"), *arguments)
    nodes, devices, gpus = expected
    assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={devices}\n" in text
    assert (f"#SBATCH --gpus-per-node={devices}\n" in text) == gpus
    assert f" --trainer.num_nodes={nodes} --trainer.devices={devices}" in text


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("trainer: {max_steps: 3}\n")
    text = _text(
        "--nodes", "2", "--devices", "4", "--config", "x.yaml", "--trainer.max_steps=5", "--nccl-debug", "INFO"
    )
    assert (
        "fit --model=M --config x.yaml --trainer.max_steps=5 --trainer.num_nodes=2 --trainer.devices=4 --ckpt_path=auto"
        in text
    )
    assert "export NCCL_DEBUG=INFO" in text
    assert "#SBATCH --ntasks-per-node=4" in text
    assert "--ckpt_path=auto" not in _text("--ckpt_path", "a.ckpt")
    # Else what a run is to start from would be passed over without a word.
    for line, auto in (("ckpt_path: new.ckpt", False), ("ckpt_path: null", True), ("# ckpt_path: a.ckpt", True)):
        (tmp_path / "run.yaml").write_text(f"trainer: {{}}\n{line}\n")
        assert ("--ckpt_path=auto" in _text("--config", str(tmp_path / "run.yaml"))) == auto
    assert "--trainer.accelerator=cpu" in _text("--cpu")
    assert "#SBATCH --partition=gpu" in _text("--partition", "gpu")
    with pytest.raises(ConfigurationError, match="NAME=VALUE"):
        _text("--env", "NCCL_DEBUG")


def test_submitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["--submit", "--output", "job.sh", "--model=Any"]
    with pytest.raises(ConfigurationError, match="--submit needs sbatch, which is not on this machine"):
        slurm.main(arguments)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "sbatch").write_text('#!/bin/sh\nread -r line; echo "$line" > taken; exit 3\n')
    (tmp_path / "sbatch").chmod(0o755)
    assert slurm.main(arguments) == 3
    assert (tmp_path / "taken").read_text() == "#!/bin/bash\n"
    assert (tmp_path / "slurm-logs").is_dir()
