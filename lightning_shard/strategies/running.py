"""The steps of a run on its data: training, evaluation and prediction, buffers and loaders alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard import _lightning
from lightning_shard.engines.replicated import broadcast_from_rank_0, persistent_buffers
from lightning_shard.mesh import data_parallel_coordinates
from lightning_shard.ranks import Ranks
from lightning_shard.resume import (
    agreeing,
    check_lengths,
    check_some,
    order_warning,
)
from lightning_shard.strategies.whole_tensors import WholeTensorsStrategy


@contextmanager
def _evaluating() -> Generator[None, None, None]:
    """No gradients, and no inference mode, whatever the loop entered: leaving inference mode turns gradients on."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


class RunningStrategy(WholeTensorsStrategy):
    """Runs the module's steps under the engine's hooks, on batches of which all ranks have equally many."""

    _predictions_left = 0
    _idle_predictions = 0

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``training_step`` under the engine's hooks."""
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self._run(self.lightning_module.training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``validation_step`` under the engine's hooks, never in inference mode."""
        assert self.lightning_module is not None
        self._in_validation()
        with self.precision_plugin.val_step_context(), _evaluating():
            return self._run(self.lightning_module.validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``test_step`` under the engine's hooks, never in inference mode."""
        assert self.lightning_module is not None
        with self.precision_plugin.test_step_context(), _evaluating():
            return self._run(self.lightning_module.test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``predict_step`` under the engine's hooks, never in inference mode.

        A rank that has no more batches repeats its last one, without using the result, as often as the longest
        rank's gathers need it.
        """
        output = self._predict(*args, **kwargs)
        self._predictions_left -= 1
        if self._predictions_left == 0:
            for _ in range(self._idle_predictions):
                self._predict(*args, **kwargs)
        return output

    def _predict(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.predict_step_context(), _evaluating():
            return self._run(self.lightning_module.predict_step, *args, **kwargs)

    def _gathers_in_forward(self) -> bool:
        """Whether a forward pass of one rank needs all others to run one too."""
        return False

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    # Buffers

    def _synchronize_buffers(self) -> None:
        """Give every rank the buffers of rank 0, so that evaluation and checkpoints do not depend on the rank."""
        assert self.lightning_module is not None
        broadcast_from_rank_0(persistent_buffers(self.lightning_module))

    def on_validation_start(self) -> None:
        """Evaluate with rank 0's buffers, on every engine alike; see also the parent's."""
        super().on_validation_start()
        self._synchronize_buffers()

    def on_test_start(self) -> None:
        """Test with rank 0's buffers, on every engine alike."""
        self._synchronize_buffers()

    def on_predict_start(self) -> None:
        """Find out how many batches the other ranks have: prediction repeats no sample to even them out."""
        self._synchronize_buffers()
        if not self._gathers_in_forward():
            return
        assert self.lightning_module is not None
        self._predictions_left = _lightning.prediction_batches(self.lightning_module.trainer)
        self._idle_predictions = max(Ranks.of().gather(self._predictions_left)) - self._predictions_left

    def _before_reading_parameters(self) -> None:
        self._synchronize_buffers()

    # Data

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make the training loader resumable, and see that all ranks have the same number of batches.

        Lightning calls it on all ranks for each loader, after it has put a distributed sampler in.

        Raises:
            DataError: sized loaders of different lengths, on every rank alike.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        stage = "predict" if trainer.predicting else "training" if trainer.training else "validation"
        if trainer.training:
            replicas, rank = data_parallel_coordinates(self.device_mesh)
            dataloader = _lightning.prepare_loader(trainer, dataloader, world_size=replicas, rank=rank)
            if self._resumed is not None and (warning := order_warning(dataloader)) is not None:
                rank_zero_warn(warning)
        length = sized_len(dataloader)
        what = f"{stage} dataloader"
        if length is None:
            check_lengths(None, what=what)
            return agreeing(dataloader, what=what)
        check = check_some if stage == "predict" else check_lengths
        check(length, what=what)
        return dataloader

    def on_train_start(self) -> None:
        """Count the batches of a resumed epoch as the present loaders do; see also the parent's."""
        super().on_train_start()
        assert self.lightning_module is not None
        _lightning.recount_batches(self.lightning_module.trainer)
