"""The Trainer's flags for its loops and loaders."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from tests.lightning_suite.stock import Net, Runs, cases, data, held_out, raised, weights


def fitted(runs: Runs, kind: Any = Net, train: Any = None, val: Any = None, **flags: Any) -> Any:
    module = runs.seeded(kind)
    trainer = runs.trainer(**{"max_epochs": 2, **flags})
    trainer.fit(module, data() if train is None else train, held_out() if val is None else val)
    return {
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "seen": module.seen,
        "metrics": trainer.callback_metrics,
        "stopped": trainer.should_stop,
        "weights": weights(module),
    }


def parts_of_epochs(runs: Runs) -> Any:
    return [
        fitted(runs, limit_train_batches=0.5, limit_val_batches=0.5),
        fitted(runs, limit_train_batches=0),
        fitted(runs, limit_val_batches=0),
        fitted(runs, overfit_batches=2, train=data(shuffle=False)),
        fitted(runs, fast_dev_run=3, enable_checkpointing=True, callbacks=[EarlyStopping("val_loss")]),
    ]


def validating_rarely(runs: Runs) -> Any:
    return [
        fitted(runs, val_check_interval=6, check_val_every_n_epoch=None, max_epochs=4),
        fitted(runs, val_check_interval=3, max_epochs=3),
        fitted(runs, check_val_every_n_epoch=2, max_epochs=5),
        fitted(runs, num_sanity_val_steps=-1),
    ]


def first_and_last_steps(runs: Runs) -> Any:
    stop = lambda **k: [EarlyStopping("val_loss", patience=0, **k)]  # noqa: E731
    rising = type(
        "Rising",
        (Net,),
        {"validation_step": lambda self, b, i: self.log("val_loss", float(self.global_step), sync_dist=True)},
    )
    return [
        fitted(runs, max_steps=5, max_epochs=-1),
        fitted(runs, max_steps=6, min_epochs=3),
        fitted(runs, rising, max_epochs=9, min_epochs=4, callbacks=stop()),
        fitted(runs, rising, max_epochs=9, min_steps=14, callbacks=stop()),
        fitted(runs, rising, max_epochs=9, callbacks=stop(check_on_train_epoch_end=False), val_check_interval=0.5),
        fitted(runs, max_time="00:00:00:00", min_steps=3),
    ]


class StoppingAll(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 3:
            self.trainer.should_stop = True


class Skipping(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


def stopping_within(runs: Runs) -> Any:
    return [fitted(runs, StoppingAll), fitted(runs, Skipping), fitted(runs, StoppingAll, min_steps=10)]


class Sources(Net):
    def loss(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return sum(super(Sources, self).loss(part) for part in batch.values() if part is not None)
        return super().loss(batch)

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", self.loss(batch), sync_dist=True)
        if self.trainer.num_val_batches and dataloader_idx == 1:
            self.log("second", float(batch_idx), add_dataloader_idx=False, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return dataloader_idx, batch_idx


def several_loaders(runs: Runs) -> Any:
    def loaders() -> Any:
        return {"a": data(), "b": data(3, count=10)}

    found = []
    for mode in ("min_size", "max_size_cycle", "max_size"):
        found.append(fitted(runs, Sources, CombinedLoader(loaders(), mode)))
    found.append(fitted(runs, Sources, loaders(), [held_out(), held_out(3)], limit_val_batches=1))
    found.append(fitted(runs, Sources, loaders(), CombinedLoader(loaders(), "max_size")))
    found.append(raised(lambda: fitted(runs, Sources, CombinedLoader(loaders(), "sequential"))))
    module = runs.seeded(Sources)
    trainer = runs.trainer()
    found.append(trainer.validate(module, [held_out(), held_out(3)], verbose=False))
    found.append(trainer.predict(module, [held_out(), held_out(3)]))
    found.append(raised(lambda: trainer.predict(module, CombinedLoader([held_out(), held_out(3)], "min_size"))))
    return found


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Any:
        x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
        return iter([(torch.tensor(i), x[i]) for i in range(self.count)])


def streams(runs: Runs) -> Any:
    def stream(n: int = 5) -> Any:
        return DataLoader(Stream(n), batch_size=2)

    return [
        fitted(runs, Net, stream(), stream(4), max_epochs=3),
        fitted(runs, Net, stream(), stream(4), max_epochs=3, limit_train_batches=2),
        fitted(runs, Net, stream(), stream(4), max_steps=5, val_check_interval=2),
        fitted(runs, Net, stream(8), stream(4), max_epochs=2, accumulate_grad_batches=3),
    ]


class Gradients(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            x = batch[1].clone().requires_grad_(True)
            self(x).sum().backward(inputs=[x])
            self.log("slope", x.grad.abs().sum(), sync_dist=True)

    test_step = validation_step


def gradients_in_validation(runs: Runs) -> Any:
    module = runs.seeded(Gradients)
    trainer = runs.trainer(inference_mode=False, max_epochs=2)
    trainer.fit(module, data(), held_out())
    return trainer.callback_metrics, trainer.test(module, held_out(), verbose=False), weights(module)


class Data(pl.LightningDataModule):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.told: list[str] = []
        self.count = 0

    def prepare_data(self) -> None:
        self.told.append("prepare")

    def setup(self, stage: str) -> None:
        self.told.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.told.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.told.append("train")
        return data(self.hparams.size)

    def val_dataloader(self) -> Any:
        self.told.append("val")
        return held_out()

    def test_dataloader(self) -> Any:
        self.told.append("test")
        return held_out()

    def predict_dataloader(self) -> Any:
        self.told.append("predict")
        return held_out()

    def state_dict(self) -> Any:
        self.told.append("state")
        return {"count": self.trainer.global_step}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0], batch[1] * 2]

    def on_exception(self, exception: BaseException) -> None:
        self.told.append(type(exception).__name__)


class Raising(Net):
    def on_train_epoch_end(self) -> None:
        raise LookupError("here")


def data_modules(runs: Runs) -> Any:
    source, module = Data(), runs.seeded()
    trainer = runs.trainer(max_epochs=1)
    trainer.fit(module, datamodule=source)
    trainer.save_checkpoint("d.ckpt")
    trainer.validate(module, datamodule=source, verbose=False)
    trainer.test(module, datamodule=source, verbose=False)
    trainer.predict(module, datamodule=source)
    other, module = Data(), runs.seeded()
    trainer = runs.trainer(max_epochs=2)
    trainer.fit(module, datamodule=other, ckpt_path="d.ckpt")
    broken = Data()
    error = raised(lambda: runs.trainer(max_epochs=1).fit(runs.seeded(Raising), datamodule=broken))
    return {
        "told": source.told,
        "other": other.told,
        "count": other.count,
        "weights": weights(module),
        "broken": broken.told,
        "error": error,
    }


CASES = cases(__name__)
