"""The most bytes that live tensors of a real step hold, beside the peak that was predicted for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_shard.commands.plan_inputs import configured_optimizers, facts_of_several, loss_of
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.planning.memory_trace import Step, trace_step
from lightning_shard.planning.model_facts import Training, facts_of, trace_optimizer
from lightning_shard.planning.predict import step_points
from lightning_shard.planning.step_memory import peak
from lightning_shard.registry import build
from lightning_shard.resume.rng import rng_state
from lightning_shard.strategies.precision import ShardPrecision
from lightning_shard.tensors import fake
from tests.models import loader, quiet_trainer
from tests.planning.counts import MODELS, Causal


class Adapters(Causal):
    """LoRA by PEFT: the base is frozen."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            from peft import LoraConfig, get_peft_model

            super().configure_model()
            self.model = get_peft_model(self.model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Manual(Causal):
    """Two optimizers, of which each has half of what is trained, step after one backward pass."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return [torch.optim.AdamW(half, lr=1e-3) for half in (trained[::2], trained[1::2])]


FORMS = {
    **MODELS,
    "LoRA": Adapters,
    "manual": Manual,
}


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


_RANDOM_STATES = {part.nbytes for part in tree_leaves(rng_state()) if isinstance(part, Tensor)}


class Peak(TorchDispatchMode):
    """The most bytes in storages, of whatever size they are at the time, but for those that were there before.

    Random states are not counted, of loaders and of recomputed units: they lie on the host on any machine.
    """

    def __init__(self, before: Mapping[int, Any]) -> None:
        super().__init__()
        self.before = dict(before)
        self.live: dict[int, Any] = {}
        self.peak = 0
        self.at = ""
        for key, storage in _storages().items():
            if key not in before and storage.nbytes() not in _RANDOM_STATES:
                self.live[key] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((result, args)):
            if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if func is torch.ops.aten.split.Tensor and storage._cdata not in self.live:
                    # gloo's reduce-scatter splits a copy of its input that it makes out of sight; NCCL's makes none.
                    self.before[storage._cdata] = storage
                if storage._cdata not in self.before and storage.nbytes() not in _RANDOM_STATES:
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
    """Watches the second step, all micro-batches of it: the optimizer's state is there."""

    def __init__(self, before: Mapping[int, Any], micro_batches: int) -> None:
        self.before = before
        self.micro_batches = micro_batches
        self.mode: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == self.micro_batches:
            self.mode = Peak(self.before)
            self.mode.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 2 * self.micro_batches - 1:
            self.mode.__exit__(None, None, None)


def in_precision(precision: str) -> dict[str, Any]:
    """The Trainer's arguments; Lightning rewrites the flag "16-mixed" on a CPU."""
    return {"plugins": [ShardPrecision("16-mixed")]} if precision == "16-mixed" else {"precision": precision}


def at_once(configure: Callable[[], Any]) -> Callable[[], Any]:
    """``configure_optimizers`` whose optimizer steps all tensors at once, as torch's do on GPUs."""

    def configured() -> Any:
        found = configure()
        for optimizer in found if isinstance(found, list) else [found]:
            for group in (optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer).param_groups:
                group["foreach"] = True
        return found

    return configured


def peaks(
    model: str,
    name: str,
    precision: str,
    checkpointing: Checkpointing,
    batch_size: int = 4,
    micro_batches: int = 1,
    **settings: Any,
) -> tuple[int, int, str, str]:
    """Counted and predicted peak of this rank, with what was going on at each; ``settings``: of the strategy."""
    ranks = torch.distributed.get_world_size()
    # So many that a rank has the batches of two steps in an epoch.
    data = loader(batch_size, count=2 * micro_batches * batch_size * ranks)
    batch = next(iter(data))
    # Held, so that no later storage gets the place of one of them.
    before = _storages()
    strategy = build(name, activation_checkpointing=checkpointing, **settings)
    watch = Watch(before, micro_batches)
    form = FORMS[model]
    # Each optimizer's step counts.
    steps = 2 if isinstance(form, type) and issubclass(form, Manual) else 1
    trainer = quiet_trainer(
        strategy=strategy,
        max_steps=2 * steps,
        callbacks=[watch],
        **in_precision(precision),
        accumulate_grad_batches=micro_batches,
    )
    mode = fake.fake_mode()
    with torch.device("meta"):
        whole = FORMS[model]()
        whole.configure_model()
    fake.make_fake(whole, mode)
    whole.__dict__["log"] = lambda *args, **kwargs: None
    inputs: Any = SimpleNamespace(module=whole, mode=mode)
    whole.__dict__["configure_optimizers"] = at_once(whole.configure_optimizers)
    optimizers, _ = configured_optimizers(inputs)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    facts = facts_of(whole, strategy.engine_for(whole), groups=groups)
    run = strategy.planned_run(ranks=ranks, per_node=ranks, device_type="cpu", accumulate_grad_batches=micro_batches)
    engine = strategy.engine_for(whole).memory_model(whole, run)
    traced = [trace_optimizer(whole, optimizer, mode) for optimizer in optimizers]
    found = facts_of_several(optimizers, traced, torch.float32)
    step = Step(
        training_step=loss_of(inputs),
        batch=batch,
        units=strategy.engine_for(whole).units(whole),
        checkpointing=checkpointing,
    )
    trace = trace_step(whole, step, strategy.policy, mode)
    del optimizers, groups
    training = Training(
        model=facts,
        policy=strategy.policy,
        optimizer=found,
        micro_batches=micro_batches,
        manual=not whole.automatic_optimization,
    )
    most = peak(step_points(training, engine, trace))
    predicted = most.account.device.total + most.account.host.total
    module = FORMS[model]()
    module.configure_optimizers = at_once(module.configure_optimizers)
    trainer.fit(module, data)
    kinds = " ".join(f"{k}={v}" for k, v in vars(most.account.device).items() if v)
    return watch.mode.peak, predicted, watch.mode.at, f"{most.name}: {kinds}"
