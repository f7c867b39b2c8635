"""Runs of Lightning's Trainer that are interrupted and go on, with this package's data position alone."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_shard._lightning import loaders
from lightning_shard.cluster.network import let_threads_finish_before_forks
from lightning_shard.ranks import Ranks
from lightning_shard.resume.rng import rng_state, seed_rng, set_rng_state
from lightning_shard.resume.wrap import check_lengths, stop_together_loader

SAMPLES = 22


class ResumingStrategy(DDPStrategy):
    """DDP, with what a strategy must do for resume: the reference for every other one."""

    rng: Any = None

    def setup_environment(self) -> None:
        super().setup_environment()
        let_threads_finish_before_forks()

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        loader = loaders.prepare_loader(trainer, dataloader, world_size=self.world_size, rank=self.global_rank)
        length = sized_len(loader)
        check_lengths(length)
        return stop_together_loader(loader) if length is None else loader

    def on_train_start(self) -> None:
        loaders.recount_batches(self.lightning_module.trainer)
        if self.rng is not None:
            set_rng_state(self.rng)
            self.rng = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        state["combined_loader"] = Ranks.of().gather(state.get("combined_loader", []))
        checkpoint["rng"] = Ranks.of().gather(rng_state())
        super().save_checkpoint(checkpoint, filepath, storage_options)
        dist.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=True)
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        rank = self.global_rank if self.global_rank < len(checkpoint["rng"]) else 0
        state["combined_loader"], self.rng = state["combined_loader"][rank], checkpoint["rng"][rank]
        return checkpoint


class Indices(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Recorder(pl.LightningModule):
    """Notes what each step gets: epoch, batch index, samples, a random number, the length of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []
        self.epochs_begun: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.epochs_begun.append(self.current_epoch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        noise = torch.rand(())
        self.seen.append((self.current_epoch, batch_idx, batch.tolist(), noise.item()))
        return self.layer(batch.float().view(-1, 1) / SAMPLES + noise).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        torch.rand(())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Saver(pl.Callback):
    """Saves at one step, in one hook."""

    def __init__(self, hook: str, step: int, path: str) -> None:
        self.hook, self.step, self.path = hook, step, path
        self.saved = False

    def _save(self, hook: str, trainer: pl.Trainer) -> None:
        if hook == self.hook and trainer.global_step == self.step and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._save("train_batch_end", trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self._save("validation_end", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._save("train_epoch_end", trainer)


def fit(
    *,
    ckpt_path: str | None = None,
    save: tuple[str, int] | None = None,
    seed: int,
    trainer: dict[str, Any],
    path: str = "saved.ckpt",
    dataset: Any = None,
    **loader: Any,
) -> dict[str, Any]:
    seed_rng(seed)
    module = Recorder()
    validation = trainer.pop("validation", False)
    run = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ResumingStrategy(),
        callbacks=[Saver(*save, path)] if save else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **({} if validation else {"limit_val_batches": 0}),
        **trainer,
    )
    training = DataLoader(dataset or Indices(), **({"batch_size": 2, "shuffle": True} | loader))
    run.fit(module, training, DataLoader(Indices(), 8) if validation else None, ckpt_path=ckpt_path)
    if save and save[0] == "end":
        run.save_checkpoint(path)
    return {
        "seen": module.seen,
        "weights": [parameter.tolist() for parameter in module.parameters()],
        "global_step": run.global_step,
        "epochs_begun": module.epochs_begun,
        "epoch": run.current_epoch,
    }


def check_resumed(results: Any, save: tuple[str, int]) -> None:
    for whole, before, after in results:
        assert len(before) == save[1] or save[0] == "end"
        assert before + after["seen"] == whole["seen"]
        assert after["weights"] == whole["weights"]
        assert after["global_step"] == whole["global_step"]
        assert after["epoch"] == whole["epoch"]
    first, second = ([step[2] for step in whole["seen"]] for whole, _, _ in results)
    assert first != second, "both ranks saw the same batches"
