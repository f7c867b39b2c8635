"""Bytes counted on live tensors of a real run, beside those that were predicted for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lightning_shard.memory import KINDS
from lightning_shard.mesh import MeshConfig
from lightning_shard.planning.model_facts import OptimizerFacts, Training, facts_of
from lightning_shard.planning.predict import step_memory
from lightning_shard.registry import PRESETS, build
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from lightning_shard.strategies.precision import ShardPrecision
from tests.models import VOCAB, TinyLM, llama, loader, quiet_trainer


class Causal(pl.LightningModule):
    """A Hugging Face Llama made from a configuration."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(3)
            sizes = {"vocab_size": 160, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
            self.model = llama(**sizes, **heads)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch[0]).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Convolutions(pl.LightningModule):
    """Kernels, batch norm with buffers, two parameter groups and another optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(24, 24, 5, padding=2), nn.BatchNorm1d(24), nn.ReLU()) for _ in range(3)
        )
        self.embed = nn.Embedding(VOCAB, 24)
        self.head = nn.Linear(24, VOCAB)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch[0]).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1).float(), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01, momentum=0.9)


MODELS = {
    "tied and frozen": lambda: TinyLM(width=48, tie=True),
    "Llama": Causal,
    "convolutions": Convolutions,
}
SLOTS = {"tied and frozen": 2, "Llama": 2, "convolutions": 1}


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found


def _bytes(tensors: Iterable[Any], *, but: Iterable[Any] = ()) -> int:
    apart = _storages(but)
    return sum(size for key, size in _storages(tensors).items() if key not in apart)


class Count(pl.Callback):
    """Counts at the optimizer's step, and its state after it."""

    def __init__(self) -> None:
        self.found: dict[str, int] = dict.fromkeys(KINDS, 0)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        tensors = getattr(trainer.strategy.engine, "_stepping", None)
        parameters = [getattr(p, "ds_tensor", p) for p in module.parameters()]
        self.found["parameters"] = _bytes(parameters)
        self.found["buffers"] = _bytes(module.buffers())
        if tensors is None:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
        else:
            zero, (optimizer,) = tensors.running.zero, tensors.optimizers()
            gradients = tensors.gradients(trainer.optimizers[0])
            gradients += [t for t in (getattr(zero, "grad_partitions_flat_buffer", None),) if t is not None]
            for group in (getattr(zero, "averaged_gradients", None) or {}).values():
                gradients += group or []
            self.found["masters"] = _bytes([group.flat for group in optimizer.groups], but=parameters)
            self.found["masters"] += _bytes(part.data for part in tensors.values.kept.values())
        self.found["gradients"] = _bytes(gradients)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        states = [value for slots in trainer.optimizers[0].state.values() for value in slots.values()]
        self.found["optimizer"] = _bytes(v for v in states if isinstance(v, Tensor))


# Meshes that no name has on one node of four.
MESHES = {
    "two copies": lambda: ShardFSDPStrategy(mesh=MeshConfig(replicate=2, shard=2)),
    "parts of two ranks": lambda: ShardFSDPStrategy(reshard_after_forward=2),
}


def strategy_of(name: str) -> Any:
    """The strategy of a name, or of one of `MESHES`."""
    return MESHES[name]() if name in MESHES else build(name)


def count(model: str, name: str, precision: str) -> tuple[dict[str, int], dict[str, int]]:
    """Counted and predicted bytes of this rank, wherever they lie, at the optimizer's step."""
    ranks = torch.distributed.get_world_size()
    strategy = strategy_of(name)
    plugins = [ShardPrecision("16-mixed")] if precision == "16-mixed" else None
    counter = Count()
    trainer = quiet_trainer(
        strategy=strategy,
        max_steps=1,
        callbacks=[counter],
        plugins=plugins,
        **({} if plugins else {"precision": precision}),
    )
    whole = MODELS[model]()
    whole.configure_model()
    optimizer = whole.configure_optimizers()
    optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
    facts = facts_of(whole, strategy.engine_for(whole), groups=optimizer.param_groups)
    engine = strategy.engine_for(whole).memory_model(
        whole, strategy.planned_run(ranks=ranks, per_node=ranks, device_type="cpu")
    )
    slots = OptimizerFacts(slots=(None,) * SLOTS[model], fixed_bytes=4 if SLOTS[model] == 2 else 0)
    step = step_memory(Training(model=facts, policy=strategy.policy, optimizer=slots), engine).step
    trainer.fit(MODELS[model](), loader())
    predicted = {k: sum(getattr(getattr(step, place), k) for place in ("device", "host", "nvme")) for k in KINDS}
    return counter.found, predicted


STATES = ("parameters", "masters", "gradients", "optimizer", "buffers")


def differences(cases: list[tuple[str, str, str]]) -> list[tuple[Any, ...]]:
    """``(model, name, precision, kind, counted, predicted)`` of each kind in each case, on this rank."""
    rows: list[tuple[Any, ...]] = []
    for case in cases:
        counted, predicted = count(*case)
        rows += [(*case, kind, counted[kind], predicted[kind]) for kind in STATES]
    return rows


def names() -> list[str]:
    """Every name but those with the aligned contract."""
    return [name for name, preset in PRESETS.items() if "aligned" not in preset.init_args]
