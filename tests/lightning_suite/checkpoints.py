"""ModelCheckpoint in all its ways: which files there are in the end, and what it knows of them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning_suite.stock import Net, Runs, cases, data, files, held_out, raised, weights


class Scored(Net):
    """Scores that do not fall in order, and differ between the ranks."""

    SCORES = (3.0, 1.0, 2.0, 0.5, 4.0, 0.25, 5.0, 6.0)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        at = self.SCORES[self.trainer.global_step // 2 % len(self.SCORES)]
        self.log("score", at + self.global_rank, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_score", self.SCORES[self.current_epoch], sync_dist=True)


def known(callback: ModelCheckpoint) -> Any:
    state = callback.state_dict()
    for key, value in state.items():
        if isinstance(value, str):
            state[key] = os.path.basename(value)
        if isinstance(value, dict):
            state[key] = {os.path.basename(k): v for k, v in value.items()}
    return state


def fitted(runs: Runs, kind: Any = Scored, fit: Any = None, **settings: Any) -> Any:
    flags = settings.pop("flags", {})
    callback = ModelCheckpoint(**{"dirpath": "saved", "filename": "{epoch}-{step}", **settings})
    module = runs.seeded(kind)
    trainer = runs.trainer(**{"callbacks": [callback], "enable_checkpointing": True, "max_epochs": 4, **flags})
    trainer.fit(module, data(), held_out())
    return {"files": files(), "known": known(callback), "steps": trainer.global_step}


def best_of_all(runs: Runs) -> Any:
    return fitted(runs, monitor="score", save_top_k=2, save_last=True, flags={"val_check_interval": 2})


def by_steps(runs: Runs) -> Any:
    return fitted(runs, every_n_train_steps=3, save_top_k=-1)


def by_steps_with_metric(runs: Runs) -> Any:
    return fitted(runs, every_n_train_steps=3, monitor="train_loss_step", save_top_k=2, save_last=True)


def by_time(runs: Runs) -> Any:
    return fitted(runs, train_time_interval=timedelta(microseconds=1), save_top_k=-1, flags={"max_epochs": 1})


def several(runs: Runs) -> Any:
    callbacks = [
        ModelCheckpoint(dirpath="one", monitor="score", save_top_k=2, filename="{step}"),
        ModelCheckpoint(dirpath="two", every_n_train_steps=5, save_top_k=-1, filename="{step}"),
        ModelCheckpoint(dirpath="two", monitor="val_loss", save_last=True, filename="v-{step}"),
    ]
    module = runs.seeded(Scored)
    trainer = runs.trainer(callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
    trainer.fit(module, data(), held_out())
    first = [known(callback) for callback in callbacks]
    # Again, from the last one, with the callbacks' states.
    callbacks = [ModelCheckpoint(dirpath="one", monitor="score", save_top_k=2, filename="{step}")]
    trainer = runs.trainer(callbacks=callbacks, enable_checkpointing=True, max_epochs=5)
    module = runs.seeded(Scored)
    trainer.fit(module, data(), held_out(), ckpt_path="two/last.ckpt")
    return {"first": first, "then": known(callbacks[0]), "files": files(), "weights": weights(module)}


def words_for_paths(runs: Runs) -> Any:
    """best, last, hpc and an own folder, for fit, validate, test and predict."""
    callback = ModelCheckpoint(dirpath="saved", monitor="score", save_last=True, filename="{step}")
    module = runs.seeded(Scored)
    trainer = runs.trainer(callbacks=[callback], enable_checkpointing=True, max_epochs=4)
    trainer.fit(module, data(), held_out())
    found: dict[str, Any] = {"best": os.path.basename(callback.best_model_path), "weights": weights(module)}
    for word in ("best", "last", None):
        tested = trainer.test(module if word else runs.seeded(Scored), held_out(), ckpt_path=word, verbose=False)
        found[f"test {word}"] = tested
    found["validate best"] = trainer.validate(module, held_out(), ckpt_path="best", verbose=False)
    found["predict best"] = trainer.predict(module, held_out(), ckpt_path="best")
    found["without module"] = trainer.test(dataloaders=held_out(), verbose=False)
    found["at"] = (trainer.current_epoch, trainer.global_step)
    for word in ("best", "last"):
        callback = ModelCheckpoint(dirpath="saved", monitor="score", save_last=True, filename="{step}")
        module = runs.seeded(Scored)
        trainer = runs.trainer(callbacks=[callback], enable_checkpointing=True, max_epochs=5)
        if word == "best":
            found["no best"] = raised(lambda t=trainer, m=module: t.test(m, held_out(), ckpt_path="best"))
        found[f"fit {word}"] = raised(lambda t=trainer, m=module, w=word: t.fit(m, data(), held_out(), ckpt_path=w))
        found[f"fitted {word}"] = weights(module), trainer.global_step
    return found


CASES = cases(__name__)
