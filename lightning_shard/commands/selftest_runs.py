"""The fits of ``lightning-shard selftest``, and the verdicts on them."""

import argparse
import hashlib
import importlib.util
import io
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import registry
from lightning_shard._lightning.messages import filter_messages
from lightning_shard.cluster.slurm_job import read_job
from lightning_shard.commands.failures import global_rank
from lightning_shard.devices import visible
from lightning_shard.errors import ShardError
from lightning_shard.ranks import Ranks
from lightning_shard.run.full_tensors import full_tensor
from lightning_shard.strategies.strategy import ShardStrategy

STEPS, HALF = 6, 3
# More than two processes sum in another order. This changed 5e-7 of a tensor's largest element in 20 steps. A gradient
# that misses a rank changes 1e-2 and more.
SUMMATION_ORDER = 1e-5
_NAMES = ("shard_ddp", "shard_fsdp", "shard_fsdp_grad_op", *(f"shard_deepspeed_stage_{stage}" for stage in (1, 2, 3)))


class Probe(pl.LightningModule):
    """Layers with sizes that ranks do not divide evenly, and dropout. ``fault`` multiplies one loss of rank 0."""

    def __init__(self, fault: float) -> None:
        super().__init__()
        self.fault, self.losses = fault, list[float]()

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            torch.manual_seed(7)
            self.layers = nn.Sequential(nn.Linear(12, 37), nn.LayerNorm(37), nn.GELU(), nn.Linear(37, 5))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(nn.functional.dropout(batch[0], 0.1)), batch[1])
        self.losses.append(loss.item())
        return loss * (self.fault if self.global_step == HALF and self.global_rank == 0 else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Run(pl.Callback):
    """One fit: save after half of the steps, and keep the full tensors at the end and every rank's losses."""

    def __init__(self, path: Path) -> None:
        self.path, self.tensors = path, dict[str, Tensor]()
        self.ranks: list[tuple[tuple[float, ...], str]] = []  # Each rank's losses, and digest of the full tensors.
        self.off_loop = ""  # The engine's difference from a plain loop over parameters.

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        assert isinstance(trainer.strategy, ShardStrategy)
        self.off_loop = trainer.strategy.check_arithmetic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == HALF:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        for name, _ in module.named_parameters():
            for slot in ("parameter", "exp_avg", "exp_avg_sq"):
                self.tensors[f"{name} ({slot})"] = torch.as_tensor(full_tensor(trainer, name, slot)).cpu()
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in self.tensors.values())).hexdigest()
        self.ranks = Ranks.of().gather((tuple(module.losses), digest))


def fit(name: str, settings: Mapping[str, Any], *, ckpt_path: Path | None = None, fault: float = 1.0) -> Run:
    """Train under a strategy name. ``settings``: arguments of the Trainer that all fits share."""
    pl.seed_everything(1, verbose=False)
    run = Run(Path(settings["default_root_dir"]) / f"{name}.ckpt")
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given: dict[str, Any] = {"max_steps": STEPS, "gradient_clip_val": 0.5, **dict.fromkeys(off, False), **settings}
    draw, count = torch.Generator().manual_seed(3), 4 * STEPS * settings["num_nodes"] * settings["devices"]
    data = TensorDataset(torch.randn(count, 12, generator=draw), torch.randint(5, (count,), generator=draw))
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints its platform and memory
        trainer = pl.Trainer(strategy=name, callbacks=[run], **given)
        trainer.fit(Probe(fault), DataLoader(data, batch_size=4, shuffle=True), ckpt_path=ckpt_path)
    return run


def difference(run: Run, reference: Run) -> str:
    """Describe the largest difference from the reference, ``""`` if there is none.

    A resumed run has the last losses alone.
    """
    limit = 0.0 if len(run.ranks) <= 2 else SUMMATION_ORDER
    if len({digest for _, digest in run.ranks}) > 1:
        return "ranks have other tensors"
    if len({losses for losses, _ in run.ranks}) < len(run.ranks):
        return "ranks read the same batches"
    found = {
        name: float((run.tensors[name] - other).abs().max() / other.abs().max())
        for name, other in reference.tensors.items()
        if not torch.equal(run.tensors[name], other)
    }
    ends = [(own, other[-len(own) :]) for (own, _), (other, _) in zip(run.ranks, reference.ranks, strict=True)]
    found["a loss"] = max(abs(a - b) for pair in ends for a, b in zip(*pair, strict=True))
    name = max(found, key=lambda name: found[name])
    return "" if found[name] <= limit else f"{name} by {found[name]:.1e}"


def run_selftest(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Train, print the table on rank 0, and return its exit code. All ranks call it."""
    filter_messages()
    for name in ("lightning_shard", "lightning.fabric", "lightning.pytorch", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    own = [f"{name}_aligned" for name in _NAMES if "deep" not in name or importlib.util.find_spec("deepspeed")]
    names = [registry.find(name).name for name in options.names or own]
    settings, is_first, had_folder = _settings(options, environ), global_rank(environ) == 0, options.folder.exists()
    ranks, bad = settings["num_nodes"] * settings["devices"], 0
    if is_first:
        print(f"{ranks} {settings['accelerator']} processes, {options.precision}, {STEPS} steps, saved after {HALF}")
        print(_line(("", "loop", "trains", "resumes", "switches")), flush=True)
    try:
        for row in _rows(names, settings, ranks):
            bad += any(cell not in ("equal", "found") for cell in row[1:])
            if is_first:
                print(_line(row), flush=True)
    finally:
        if is_first and not had_folder:
            shutil.rmtree(options.folder, ignore_errors=True)
    if is_first:
        alone = " (one process shards and reduces nothing: give more devices)" if ranks == 1 else ""
        print(f"{bad} of these lines are not as they should be" if bad else f"all is equal{alone}")
    # Lightning's launcher ends rank 0 if another process fails.
    return int(is_first and bad > 0)


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(32 if i == 0 else 8) for i, cell in enumerate(cells)).rstrip()


def _settings(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    accelerator = options.accelerator or ("gpu" if visible() else "cpu")
    nodes, devices, job = 1, options.devices or (visible() if accelerator == "gpu" else 2), read_job(environ)
    if "RANK" in environ:
        devices = int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"]))
        nodes = int(environ["WORLD_SIZE"]) // devices
    elif job is not None and job.uses_srun:
        nodes = job.nodes or 1
        devices = (job.tasks or nodes) // nodes
    found = {"num_nodes": nodes, "devices": devices, "accelerator": accelerator}
    return {**found, "precision": options.precision, "default_root_dir": options.folder}


def _rows(names: Sequence[str], settings: Mapping[str, Any], ranks: int) -> Iterator[tuple[str, ...]]:
    """Yield each name with its verdicts, then the fault's verdict. All ranks iterate to the end."""
    runs: dict[str, Run] = {}
    for name in names:
        try:
            runs[name] = fit(name, settings)
        except ShardError as error:
            yield name, f"refused: {error}"
    trained = [*runs.values()]
    for i, (name, own) in enumerate(runs.items()):
        resumed, switched = (fit(name, settings, ckpt_path=path) for path in (own.path, trained[i - 1].path))
        pairs = ((own, trained[0]), (resumed, own), (switched, trained[0]))
        told = (own.off_loop, *(difference(*pair) for pair in pairs))
        yield name, *(f"DIFFERS: {text}" if text else "equal" for text in told)
    if trained:
        factor = 1.01 if ranks <= 2 else 2.0  # more than bf16 rounds off, or than the order of sums changes
        found = difference(fit([*runs][-1], settings, fault=factor), trained[0])
        yield f"one loss of rank 0 times {factor:g}", "found" if found else "NOT FOUND"
