"""What a hook froze before a checkpoint, and a resumed run trains, is told."""

from __future__ import annotations

import warnings

from lightning_shard.run.data import other_frozen
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


class FreezesLater(TinyLM):
    """A hook freezes the head after the first epoch."""

    def on_train_epoch_end(self) -> None:
        self.head.requires_grad_(False)


def _frozen_before(strategy: str) -> list[str]:
    for steps, path in ((3, None), (5, "half.ckpt")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = quiet_trainer(strategy=strategy, max_steps=steps)
            trainer.fit(FreezesLater(), loader(count=4 * trainer.world_size * 2), ckpt_path=path)
        trainer.save_checkpoint("half.ckpt")
    return [said for each in caught if "when the checkpoint was saved" in (said := str(each.message))]


def test_parameters_that_a_hook_froze_before_are_told() -> None:
    (said,) = run_distributed(_frozen_before, 1, "shard_fsdp")[0]
    assert said.startswith("Frozen when the checkpoint was saved")
    assert ": head.weight. " in said


def test_only_what_is_other_is_told() -> None:
    said = other_frozen(["gone", "a"], {"a": False, "b": False, "c": True})
    assert said is not None
    assert said.split(". ")[0].endswith(": a, c")
    assert other_frozen(["gone", "a"], {"a": True, "b": False}) is other_frozen(None, {"a": True}) is None
