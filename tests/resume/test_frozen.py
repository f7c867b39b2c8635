"""What a hook froze before a checkpoint, and a resumed run trains, is told."""

from __future__ import annotations

import warnings

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
