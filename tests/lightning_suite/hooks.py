"""Which hooks are called, in which order, with what is done in between: as under stock ``ddp``."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.lightning_suite.stock import Net, Runs, cases, data, held_out, weights

# Not hooks, or asked for rather than called: how often is Lightning's own affair and a strategy's.
_METHODS = {"optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward", "configure_gradient_clipping"}
_OF_MODULES = {
    name
    for name, _ in inspect.getmembers(pl.LightningModule, inspect.isfunction)
    if name.startswith("on_") or name in _METHODS or name in {"setup", "teardown", "transfer_batch_to_device"}
} - {"on_gpu"}
_OF_CALLBACKS = {
    name
    for name, _ in inspect.getmembers(pl.Callback, inspect.isfunction)
    if name.startswith("on_") or name in {"setup", "teardown", "state_dict", "load_state_dict"}
}


def _telling(base: Any, names: set[str], prefix: str) -> Any:
    def telling(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.told.append(f"{prefix}{name}")
            return getattr(base, name)(self, *args, **kwargs)

        return call

    return type(f"Telling{base.__name__}", (base,), {name: telling(name) for name in sorted(names)})


class ManualNet(Net):
    """Two optimizers that take turns, and a schedule that is stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        body, head = self.optimizers()
        for optimizer in (body, head):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        if self.trainer.is_last_batch:
            for schedule in self.lr_schedulers():
                schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.AdamW(part.parameters(), lr=self.lr) for part in (self.body, self.head)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]


def _told(runs: Runs, base: Any, **flags: Any) -> tuple[Any, Any, pl.Trainer]:
    told: list[str] = []
    module = runs.seeded(_telling(base, _OF_MODULES, ""))
    module.told = told
    callback = _telling(pl.Callback, _OF_CALLBACKS, "callback.")()
    callback.told = told
    given = {"enable_checkpointing": True, "max_epochs": 2, **flags}
    return module, told, runs.trainer(callbacks=[callback], **given)


def of_a_fit(runs: Runs) -> Any:
    module, told, trainer = _told(runs, Net, accumulate_grad_batches=2, gradient_clip_val=0.5, val_check_interval=0.5)
    trainer.fit(module, data(), held_out())
    # The module's end of a validation comes ahead of a save here, which has what it does.
    ends = [hook for hook in told if hook == "on_validation_end"]
    return {"told": [hook for hook in told if hook not in ends], "ends": ends, "weights": weights(module)}


def of_a_fit_by_hand(runs: Runs) -> Any:
    module, told, trainer = _told(runs, ManualNet)
    trainer.fit(module, data(), held_out())
    return {"told": told, "weights": weights(module), "steps": trainer.global_step}


of_a_fit_by_hand.leaves_out = True


def toggled_without_a_word(runs: Runs) -> Any:
    """What a turn leaves out needs ``find_unused_parameters`` under DDP."""
    runs.trainer(max_epochs=1).fit(runs.seeded(ManualNet), data())


def of_evaluation(runs: Runs) -> Any:
    module, told, trainer = _told(runs, Net)
    results = [trainer.validate(module, held_out(), verbose=False), trainer.test(module, held_out(), verbose=False)]
    results.append(trainer.predict(module, held_out()))
    return {"told": told, "results": results}


def of_a_resume(runs: Runs) -> Any:
    module, first, trainer = _told(runs, Net, max_epochs=1)
    trainer.fit(module, data(), held_out())
    path = trainer.checkpoint_callback.best_model_path
    module, told, trainer = _told(runs, Net)
    trainer.fit(module, data(), held_out(), ckpt_path=path)
    # As under all strategies that restore into what they have sharded, it is told after on_fit_start.
    loads = [name for name in told if name.endswith("on_load_checkpoint")]
    told = [name for name in told if name not in loads]
    return {"told": told, "loads": loads, "first": first, "weights": weights(module)}


class Own(pl.Callback):
    def __init__(self, number: int = 0) -> None:
        self.number, self.steps = number, 0

    @property
    def state_key(self) -> str:
        return f"Own{self.number}"

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1

    def state_dict(self) -> Any:
        return {"steps": self.steps, "text": ["a", (1, 2.5)], "tensor": torch.arange(3)}

    def load_state_dict(self, state: Any) -> None:
        self.steps, self.loaded = state["steps"], state


class Configuring(Net):
    def configure_callbacks(self) -> Any:
        return [Own(7), ModelCheckpoint(save_last=True, monitor="val_loss", dirpath="own")]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"epoch": self.current_epoch, "list": [1, "b"], "tensor": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["own"]


def state_of_callbacks_and_modules(runs: Runs) -> Any:
    module, callbacks = runs.seeded(Configuring), [Own(), Own(1)]
    trainer = runs.trainer(max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, data(), held_out())
    kinds = [type(each).__name__ for each in trainer.callbacks]
    module, callbacks = runs.seeded(Configuring), [Own(), Own(1)]
    trainer = runs.trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, data(), held_out(), ckpt_path="own/last.ckpt")
    return {
        "kinds": kinds,
        "loaded": [each.loaded for each in trainer.callbacks if isinstance(each, Own)],
        "own": module.loaded,
        "steps": [each.steps for each in trainer.callbacks if isinstance(each, Own)],
        "weights": weights(module),
    }


class Scaled(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def overridden_backward(runs: Runs) -> Any:
    found = []
    for accumulate in (1, 2):
        module = runs.seeded(Scaled)
        trainer = runs.trainer(max_epochs=2, accumulate_grad_batches=accumulate)
        trainer.fit(module, data(), held_out())
        found.append(weights(module))
    return found


CASES = [each for each in cases(__name__) if each is not toggled_without_a_word]
