"""The most bytes that live tensors of a real step hold, beside the peak that was predicted for it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_shard.planning import fake
from lightning_shard.planning.facts import OptimizerFacts
from lightning_shard.planning.trace import Step, trace_step
from lightning_shard.planning.walk import peak, walk
from lightning_shard.registry import PRESETS
from lightning_shard.strategies.planned import engine_of, facts_of, units_of
from tests.models import loader, quiet_trainer
from tests.plan_counts import MODELS, SLOTS


def _storages() -> dict[int, Any]:
    """All storages of all tensors that there are."""
    gc.collect()
    found = {}
    for tensor in [o for o in gc.get_objects() if issubclass(type(o), Tensor)]:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type == "cpu" and type(local) in (Tensor, torch.nn.Parameter):
            storage = local.untyped_storage()
            found[storage._cdata] = storage
    return found


class Peak(TorchDispatchMode):
    """The most bytes in storages, of whatever size they are at the time, but for those that were there before."""

    def __init__(self, before: set[int]) -> None:
        super().__init__()
        self.before = before
        self.live: dict[int, Any] = {}
        self.peak = 0
        self.at = ""
        for key, storage in _storages().items():
            if key not in before:
                self.live[key] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((result, args)):
            if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.live[storage._cdata] = weakref.ref(storage)
        total = 0
        for key, reference in list(self.live.items()):
            storage = reference()
            if storage is None:
                del self.live[key]
            else:
                total += storage.nbytes()
        if total > self.peak:
            self.peak, self.at = total, str(func)
        return result


class Watch(pl.Callback):
    """Watches the second step: the optimizer's state is there."""

    def __init__(self, before: set[int]) -> None:
        self.before = before
        self.mode: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == 1:
            self.mode = Peak(self.before)
            self.mode.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)


def strategy_of(name: str, checkpointing: bool) -> Any:
    """The strategy of a name, with small buckets."""
    import importlib

    from lightning_shard.registry import _built

    preset = PRESETS[name]
    module, _, attribute = preset.class_path.rpartition(".")
    arguments = {key: _built(key, value) for key, value in preset.init_args.items()}
    if checkpointing:
        arguments["activation_checkpointing"] = "units"
    return getattr(importlib.import_module(module), attribute)(**arguments)


def peaks(model: str, name: str, precision: str, checkpointing: bool, batch_size: int = 4) -> tuple[int, int, str, str]:
    """Counted and predicted peak of this rank, with what was going on at each."""
    ranks = torch.distributed.get_world_size()
    # So many that a rank has two batches in an epoch.
    data = loader(batch_size, count=2 * batch_size * ranks)
    batch = next(iter(data))
    before = set(_storages())
    strategy = strategy_of(name, checkpointing)
    watch = Watch(before)
    trainer = quiet_trainer(strategy=strategy, max_steps=2, callbacks=[watch], precision=precision)
    mode = fake.fake_mode()
    with mode:
        whole = MODELS[model]()
        whole.configure_model()
    fake.make_fake(whole, mode)
    whole.__dict__["log"] = lambda *args, **kwargs: None
    with mode:
        optimizer = whole.configure_optimizers()
    optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
    facts = facts_of(strategy, whole, groups=optimizer.param_groups)
    engine = engine_of(strategy, whole, ranks=ranks, per_node=ranks, device_type="cpu")
    slots = OptimizerFacts(slots=(None,) * SLOTS[model], fixed_bytes=4 if SLOTS[model] == 2 else 0)
    step = Step(
        loss=lambda b: whole.training_step(b, 0),
        batch=batch,
        units=units_of(strategy, whole),
        checkpointing="units" if checkpointing else None,
    )
    trace = trace_step(whole, step, strategy.policy, mode)
    del optimizer
    most = peak(walk(facts, engine, strategy.policy, slots, trace))
    predicted = most.account.device.total + most.account.host.total
    trainer.fit(MODELS[model](), data)
    kinds = " ".join(f"{k}={v}" for k, v in vars(most.account.device).items() if v)
    return watch.mode.peak, predicted, watch.mode.at, f"{most.name}: {kinds}"
