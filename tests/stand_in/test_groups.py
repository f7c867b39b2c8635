"""Which process groups a fit's collectives run on, where the default one has no CPU backend, as under NCCL.

Objects are pickled into tensors of the host: over a device's backend each would cost a copy and a wait for the device.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard import ShardPrecision, full_tensor
from lightning_shard.callbacks import ThroughputCallback
from tests import stand_in
from tests.harness import run_distributed
from tests.models import TinyLM, Tokens, loader, quiet_trainer
from tests.strategies.engines import ENGINES

pytestmark = pytest.mark.skipif(not stand_in.chosen(), reason="set TESTS_DEVICE=stand_in")

OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
TENSORS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all_single", "broadcast"),
    *("gather", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter"),
    "send",
)


class Call(NamedTuple):
    phase: str
    name: str
    device: str  # Of what is sent; "object": pickled.
    backend: str  # What the group has for it.


class Phases(Callback):
    """Notes what a fit is doing."""

    now = "start"

    def _begin(self, phase: str) -> Callable[..., None]:
        def hook(*_: Any, **__: Any) -> None:
            self.now = phase

        return hook

    def __init__(self) -> None:
        self.on_train_start = self.on_validation_end = self._begin("steps")
        self.on_validation_start = self._begin("validation")
        self.on_save_checkpoint = self._begin("save")
        self.on_train_batch_start = self._begin("steps")
        self.on_train_end = self.on_fit_end = self._begin("end")


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    found = map(_first_tensor, value) if isinstance(value, list | tuple) else ()
    return next((tensor for tensor in found if tensor is not None), None)


@contextlib.contextmanager
def recorded(phases: Phases, calls: set[Call]) -> Iterator[None]:
    """Torch's own collectives, and what is called of them."""
    undo = contextlib.ExitStack()
    for name in (*OBJECTS, *(name for name in TENSORS if hasattr(dist, name))):
        function = getattr(dist, name)

        def call(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            given = inspect.signature(_function).bind(*args, **kwargs).arguments
            backends = dist.get_backend_config(given.get("group"))
            of = dict(pair.split(":") for pair in backends.split(","))
            tensor = _first_tensor(list(given.values()))
            device = "object" if _name in OBJECTS or tensor is None else tensor.device.type
            calls.add(Call(phases.now, _name, device, of.get("cpu" if device == "object" else device, "none")))
            return _function(*args, **kwargs)

        for module in (dist, distributed_c10d):
            if vars(module).get(name) is function:
                setattr(module, name, call)
                undo.callback(setattr, module, name, function)
    with undo:
        yield


class Model(TinyLM):
    """Logs a mean over ranks in training too."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("mean", loss, sync_dist=True)
        self.all_gather(loss.detach())
        return {"loss": loss, "weight": torch.tensor(2.0)}

    def on_train_batch_end(self, *_: Any) -> None:
        if isinstance(self.head.weight, DTensor):
            self.log("norm", self.head.weight.norm())


def life(name: str, precision: str, options: dict[str, Any]) -> set[Call]:
    """A fit with saves and validations, one that resumes, and what users do after it."""
    calls: set[Call] = set()
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.reset_peak_memory_stats(device)
    for ckpt_path, steps in ((None, 4), ("last.ckpt", 6)):
        phases = Phases()
        phases.now = "start" if ckpt_path is None else "resume"
        saving = ModelCheckpoint(dirpath=".", filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = quiet_trainer(
            strategy=ENGINES[name](async_save=ckpt_path is None, **options),
            plugins=[ShardPrecision(precision)],
            max_steps=steps,
            val_check_interval=2,
            limit_val_batches=2,
            limit_test_batches=2,
            limit_predict_batches=2,
            gradient_clip_val=0.1,
            enable_checkpointing=True,
            callbacks=[phases, saving, ThroughputCallback(every_n_steps=2)],
        )
        with recorded(phases, calls):
            trainer.fit(Model(), loader(), loader(), ckpt_path=ckpt_path)
            phases.now = "save"
            full_tensor(trainer, "head.weight")
            full_tensor(trainer, "head.weight", "exp_avg")
            trainer.save_checkpoint("last.ckpt")
            for evaluate in (trainer.test, trainer.predict):
                phases.now = evaluate.__name__
                evaluate(dataloaders=DataLoader(Stream(), 4), ckpt_path="last.ckpt")
        assert dist.get_backend_config() == f"{stand_in.NAME}:{stand_in.NAME}"
    # Threads begin with the first device as the current one, which is another rank's.
    peaks = map(torch.accelerator.max_memory_allocated, range(torch.accelerator.device_count()))
    assert [device for device, peak in enumerate(peaks) if peak] == [trainer.strategy.root_device.index]
    return calls


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Of no length, so that ranks agree before each batch whether there is one."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from Tokens(64)


ALL = {"aligned": True, "nonfinite": "skip", "loss_weight_key": "weight", "log_grad_norm": True}
NAMES = ("ddp_plain", "full", "grad_op", "hybrid_1x2", "hybrid_2x1", "offload", "zero_1", "zero_2", "zero_3")


@pytest.mark.parametrize(
    ("name", "precision", "options"),
    [
        *((name, "32-true", {}) for name in NAMES),
        *((name, "16-mixed", ALL) for name in NAMES),
        # What is ignored is full and on the device, beside shards on the host.
        ("offload", "32-true", {"mesh": {"replicate": 2}, "ignored_modules": ["Embedding"]}),
    ],
)
def test_objects_go_over_the_host_and_tensors_over_their_device(
    name: str, precision: str, options: dict[str, Any]
) -> None:
    for calls in run_distributed(life, 2, name, precision, options):
        expected = {"object": "gloo", "cpu": "gloo", stand_in.NAME: stand_in.NAME}
        assert {call for call in calls if call.backend != expected[call.device]} == set()
        assert {call.phase for call in calls if call.device == "object"} >= {"start", "save", "resume", "test"}
        assert {call.phase for call in calls if call.device == stand_in.NAME} >= {"steps", "validation"}
