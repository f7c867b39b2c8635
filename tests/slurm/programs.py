"""What the tasks of the tests' jobs run: ``python -m tests.slurm.programs NAME JSON-ARGUMENTS``.

The functions run under the tests' own processes too (``run_distributed``), which gives what a job's results are
compared with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor

from lightning_shard import (
    ConfigurationError,
    MeshConfig,
    PreemptionConfig,
    ShardDDPStrategy,
    ShardDeepSpeedStrategy,
    ShardFSDPStrategy,
)
from tests.models import TinyLM, loader, whole_parameters

STRATEGIES: dict[str, Any] = {
    "ddp": lambda **kwargs: ShardDDPStrategy(**kwargs),
    "fsdp": lambda **kwargs: ShardFSDPStrategy(**kwargs),
    "hybrid": lambda **kwargs: ShardFSDPStrategy(mesh=MeshConfig(replicate="auto", shard="auto"), **kwargs),
    "zero_2": lambda **kwargs: ShardDeepSpeedStrategy(stage=2, **kwargs),
    "zero_3": lambda **kwargs: ShardDeepSpeedStrategy(stage=3, **kwargs),
}


def digest(module: torch.nn.Module) -> str:
    """Of all parameters, whole. All ranks call it."""
    sha = hashlib.sha256()
    for name, value in sorted(whole_parameters(module).items()):
        sha.update(name.encode() + value.numpy().tobytes())
    return sha.hexdigest()


def trainer(strategy: Any, root: str, **kwargs: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "max_epochs": -1,
    }
    return pl.Trainer(strategy=strategy, default_root_dir=root, **{**defaults, **kwargs})


def strategies(root: str, devices: int, nodes: int, shapes: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Losses, validation losses and parameters of six steps, three of them resumed, under each strategy.

    ``shapes``: meshes in place of "auto", for a run on one machine.
    """
    results = {}
    for name, make in STRATEGIES.items():
        mesh = {"mesh": MeshConfig(**shapes[name])} if name in shapes else {}
        settings = {"devices": devices, "num_nodes": nodes, "val_check_interval": 3}
        first, second = TinyLM(dropout=0.1), TinyLM(dropout=0.1)
        losses: list[float] = []
        for module, steps, ckpt_path in ((first, 3, None), (second, 6, f"{root}/{name}.ckpt")):
            torch.manual_seed(5)
            strategy = ShardFSDPStrategy(**mesh) if mesh else make()
            run = trainer(strategy, root, max_steps=steps, **settings)
            run.fit(module, loader(), loader(count=32, shuffle=False), ckpt_path=ckpt_path)
            losses += [*module.losses, float(run.callback_metrics["val_loss"])]
            run.save_checkpoint(f"{root}/{name}.ckpt")
        validated = run.validate(second, loader(count=32, shuffle=False), verbose=False)
        results[name] = {
            "losses": losses,
            "validated": validated[0]["val_loss"],
            "parameters": digest(second),
            "mesh": dict(zip(strategy.device_mesh.mesh_dim_names, strategy.device_mesh.shape, strict=True)),
        }
    return results


class Slow(TinyLM):
    """Takes its time, each rank another; says in a file what it does."""

    def __init__(self, log: Path | None, seconds: float) -> None:
        super().__init__(dropout=0.1)
        self.log_file, self.seconds = log, seconds
        self.own = random.Random()

    def _say(self, what: str) -> None:
        if self.log_file is not None and self.trainer.is_global_zero:
            with self.log_file.open("a") as file:
                file.write(f"{what} {self.global_step}\n")

    def _idle(self) -> None:
        # One rank is slower than the other, by more than a step now and then.
        time.sleep(self.own.uniform(0, 3 * self.seconds) if self.trainer.global_rank == 1 else self.seconds)

    def on_train_start(self) -> None:
        self._say("start")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self._say("train")
        self._idle()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._say("validation")
        self._idle()
        super().validation_step(batch, batch_idx)


class SlowAlone(Slow):
    """With data of its own, for the command line."""

    def __init__(self, log: str, seconds: float = 0.1) -> None:
        super().__init__(Path(log), seconds)

    def train_dataloader(self) -> Any:
        return loader()


def slow(
    root: str,
    devices: int,
    nodes: int,
    steps: int,
    seconds: float,
    engine: str = "ddp",
    log: str | None = None,
    seed: int = 0,
    preemption: dict[str, Any] | None = None,
    lost_rank_seconds: float = 120.0,
) -> dict[str, Any]:
    """A fit that can be stopped at any time, validating every 10 steps and saving every 5; its result."""
    seed += int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    torch.manual_seed(seed)
    module = Slow(None if log is None else Path(log), seconds)
    module.seed = seed
    saves = ModelCheckpoint(
        dirpath=f"{root}/checkpoints", every_n_train_steps=5, save_top_k=2, monitor="step", mode="max"
    )
    run = trainer(
        STRATEGIES[engine](preemption=PreemptionConfig(**(preemption or {})), lost_rank_seconds=lost_rank_seconds),
        root,
        devices=devices,
        num_nodes=nodes,
        max_steps=steps,
        val_check_interval=10,
        enable_checkpointing=True,
        callbacks=[saves],
    )
    run.fit(module, loader(), loader(count=48, shuffle=False), ckpt_path="auto")
    return {"parameters": digest(module), "steps": run.global_step, "own_steps": len(module.losses)}


def wrong(root: str, private: str) -> list[dict[str, str]]:
    """What each of two tasks is told by fits that are wrong in some way; at last one that is right."""
    rank = int(os.environ["SLURM_PROCID"])
    fake = Path(root) / "fake" / "deepspeed-0.1.dist-info"
    fake.mkdir(parents=True, exist_ok=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1\n")
    address = SLURMEnvironment().main_address
    told: dict[str, str] = {}

    def attempt(case: str, *, path: str = "", host: str = address, occupied: bool = False, **settings: Any) -> None:
        _together(Path(root) / f"{case}-{rank}", Path(root) / f"{case}-{1 - rank}")
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(32100 + len(told))
        with contextlib.ExitStack() as stack:
            if occupied:
                stack.enter_context(socket.create_server(("", 32100 + len(told))))
            if path:
                sys.path.insert(0, path)
                stack.callback(sys.path.remove, path)
            try:
                # What waits for nobody has all the time that a busy machine takes to import.
                seconds = 6 if case in ("address", "port") else 120
                strategy = ShardDDPStrategy(init_timeout_seconds=seconds)
                run = trainer(strategy, **{"root": root, "devices": 1, "num_nodes": 2, "max_steps": 1, **settings})
                run.fit(TinyLM(), loader())
                told[case] = "ran"
            except ConfigurationError as error:
                told[case] = str(error)

    attempt("nodes", num_nodes=3)
    attempt("devices", devices=2)
    attempt("settings", max_steps=3 + rank)
    attempt("folder", root=private)
    attempt("address", host="nowhere.invalid")
    attempt("port", occupied=rank == 0)
    attempt("versions", path=str(fake.parent) if rank == 1 else "")
    attempt("nothing")
    everything: list[Any] = [None, None]
    torch.distributed.all_gather_object(everything, told)
    return everything


def _together(own: Path, other: Path) -> None:
    own.touch()
    while not other.exists():
        time.sleep(0.05)


class Failing(TinyLM):
    """One rank fails in its third step; the other may be stuck at that time, outside of every collective."""

    def __init__(self, how: str, stuck: bool) -> None:
        super().__init__()
        self.how, self.stuck = how, stuck

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("token 50257 is not in the vocabulary")
        if batch_idx == 2 and self.stuck:
            time.sleep(600)
        return super().training_step(batch, batch_idx)


def failing(root: str, how: str, stuck: bool) -> None:
    """Two tasks, of which the second fails; the first says how long it took to end."""
    strategy = ShardDDPStrategy(lost_rank_seconds=4)
    run = trainer(strategy, root, devices=1, num_nodes=2, max_steps=10)
    run.fit(Failing(how, stuck), loader())


PROGRAMS = {"strategies": strategies, "slow": slow, "wrong": wrong, "failing": failing}


def main(name: str, arguments: str, output: str) -> None:
    """Run a program as a task; rank 0 writes its result as JSON."""
    result = PROGRAMS[name](**json.loads(arguments))
    if torch.distributed.get_rank() == 0:
        Path(f"{output}.part").write_text(json.dumps(result))
        Path(f"{output}.part").rename(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
