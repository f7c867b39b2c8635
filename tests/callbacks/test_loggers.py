"""What the callbacks and the strategies log reaches the loggers that people use, with the real packages."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard.callbacks import MemoryCallback, ThroughputCallback
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer

METERS = {"tokens/s", "mfu", "step_seconds", "memory/resident_gib", "grad_norm", "train_loss"}
PACKAGES = {"csv": "csv", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


class Logs(TinyLM):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


def _logger(kind: str, folder: str) -> Any:
    from lightning.pytorch import loggers

    if kind == "csv":
        return loggers.CSVLogger(folder)
    if kind == "tensorboard":
        return loggers.TensorBoardLogger(folder)
    if kind == "wandb":
        return loggers.WandbLogger(save_dir=folder, offline=True, project="runs")
    # A file for each process: two that make the tables of one at once get in each other's way.
    rank = dist.get_rank()
    return loggers.MLFlowLogger(
        tracking_uri=f"sqlite:///{folder}/mlflow{rank}.db", artifact_location=f"file://{folder}"
    )


def _fit(kind: str, folder: str, strategy: str) -> bool:
    meters = [ThroughputCallback(every_n_steps=2, peak_tflops=1.0), MemoryCallback()]
    logger = _logger(kind, folder)
    settings = {"logger": logger, "log_every_n_steps": 2, "gradient_clip_val": 1.0, "callbacks": meters}
    quiet_trainer(strategy=strategy, max_steps=4, **settings).fit(Logs(), loader())
    logger.finalize("success")
    if kind == "wandb":
        importlib.import_module("wandb").finish()
    return bool(meters[0].windows)


def _read(kind: str, folder: Path) -> set[str]:
    if kind == "csv":
        (file,) = folder.rglob("metrics.csv")
        return set(file.read_text().splitlines()[0].split(","))
    if kind == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (file,) = folder.rglob("events.out.*")
        events = EventAccumulator(str(file))
        events.Reload()
        return set(events.Tags()["scalars"])
    if kind == "wandb":
        (file,) = folder.rglob("*.wandb")
        written = file.read_bytes()  # protocol buffers, in which names stand as they are
        return {name for name in METERS if name.encode() in written}
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow0.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return set(run.data.metrics)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sampled(list(PACKAGES), 0))
def test_a_logger_has_the_meters_of_all_ranks(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        pytest.skip(f"{PACKAGES[kind]} is not installed")
    assert all(run_distributed(_fit, 2, kind, str(tmp_path), "shard_fsdp", timeout=240))
    assert _read(kind, tmp_path) >= METERS


class Drawn(TinyLM):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(1, 8, dtype=dtype)


def _drawn(strategy: str, precision: str, dtype: torch.dtype = torch.long) -> list[str]:
    """Names of the modules in the graph that TensorBoard was given on rank 0, and what was warned of it."""
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger("logs", log_graph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=1, logger=logger)
        trainer.fit(Drawn(dtype), loader())
    logger.finalize("success")
    if trainer.global_rank:
        return []
    said = [str(w.message) for w in caught if "graph is not logged" in str(w.message)]
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return said or sorted({node.name.split("/")[1] for node in events.Graph().node if node.name.count("/") > 1})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "precision"),
    sampled(
        [("shard_fsdp", "32-true"), ("shard_ddp", "bf16-mixed"), ("shard_deepspeed_stage_3", "bf16-mixed")],
        0,
    ),
)
def test_the_graph_of_the_model_is_drawn(strategy: str, precision: str) -> None:
    pytest.importorskip("tensorboard")
    drawn, _ = run_distributed(_drawn, 2, strategy, precision)
    assert any("head" in name for name in drawn), drawn
    assert any("blocks" in name for name in drawn), drawn
