"""A module under stock Lightning's strategies and under DeepSpeed alone, and the checkpoints that they save."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from tests.models import quiet_trainer, whole

ROWS = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))


class Counts(nn.Linear):
    """Its calls in training are extra state, as a tensor: FSDP's strategy saves no other."""

    calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(rows)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)


class Net(nn.Module):
    """Odd sizes, a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = Counts(7, 5)
        self.scale = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows).tanh()) * self.scale + self.shift


class Model(pl.LightningModule):
    """Two parameter groups, in another order than the module's, and a scheduler."""

    def __init__(self, extra: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net: nn.Module = Net()

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        return (self.net(rows) - rows).square().mean()

    def configure_optimizers(self) -> Any:
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in self.named_parameters() if name.endswith("weight")]
        optimizer = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class WrappedModel(Model):
    """Wrapped by itself, since FSDPStrategy's own wrapping needs a GPU; its saving does not."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            super().configure_model()
            host = {"device_id": torch.device("cpu"), "use_orig_params": True}
            frozen = [self.net.scale]
            self.net.first = FullyShardedDataParallel(self.net.first, **host)
            self.net = FullyShardedDataParallel(self.net, ignored_states=frozen, **host)


class HostFSDPStrategy(FSDPStrategy):
    """The Trainer refuses FSDPStrategy itself without a GPU, before it looks at the module."""


def state_of(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer slots by name, whole."""
    module = trainer.lightning_module
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = {p: name for name, p in module.named_parameters()}
    for parameter, slots in trainer.optimizers[0].state.items():
        tensors |= {f"{names[parameter]}.{slot}": value for slot, value in slots.items()}
    return {name: whole(tensor) for name, tensor in tensors.items()}


def fit(
    strategy: Any, epochs: int, save: str = "", ckpt_path: str | None = None, module: Any = Model, **kwargs: Any
) -> Any:
    warnings.filterwarnings("ignore", category=FutureWarning)
    trainer = quiet_trainer(strategy=strategy, max_epochs=epochs, default_root_dir=os.getcwd(), **kwargs)
    trainer.fit(module(), DataLoader(ROWS, 4, shuffle=True), ckpt_path=ckpt_path, weights_only=True)
    if save:
        trainer.save_checkpoint(save)
    assert not [name for name in os.listdir() if name.startswith(".converted")]
    return trainer


def fit_stock(kind: str, epochs: int, save: str = "", ckpt_path: str | None = None) -> pl.Trainer:
    if kind == "fsdp":
        strategy = HostFSDPStrategy(state_dict_type="sharded")
        return fit(strategy, epochs, save, ckpt_path, WrappedModel)
    return fit("ddp" if dist.get_world_size() > 1 else "auto", epochs, save, ckpt_path)


def save_stock(kind: str, path: str) -> None:
    fit_stock(kind, 2, path)


CLIENT = {"epoch": 3, "mine": {"x": [1, 2]}}


class Tied(nn.Module):
    """Odd sizes, a tie, a frozen parameter, a buffer, one parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = Counts(7, 3, bias=False)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.first.weight
        self.one = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Parameter(torch.tensor([0.25, 0.5, 0.75]), requires_grad=False)
        self.register_buffer("shift", torch.tensor(2.5))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows) + self.tied(rows)) * self.frozen * self.one


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    named = dict(module.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    return [
        {"params": weights, "weight_decay": 0.3},
        {"params": [p for n, p in named.items() if "bias" in n or n == "one"]},
    ]


def forget_groups() -> None:
    """DeepSpeed keeps the groups that it made under an earlier process group, of an earlier call of the harness."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    for name, value in vars(groups).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)


def save_deepspeed(stage: int, bf16: bool, path: str, subgroups: int = 10**9) -> dict[str, Tensor]:
    """Save three steps of plain DeepSpeed with `CLIENT`. Returned: masters and slots as its own API gives them."""
    import deepspeed
    from deepspeed.utils import (
        lazy_init_hp_params_optimizer_state,
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    from lightning_shard.engines.zero.connection import _choose_accelerator

    # Another one compiles a kernel for a minute, which nothing uses.
    _choose_accelerator(torch.device("cpu"))
    forget_groups()
    warnings.filterwarnings("ignore")
    module = Tied()
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.1)
    zero: dict[str, Any] = {"stage": stage} | ({"sub_group_size": subgroups} if stage == 3 else {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
    }
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, lr_scheduler=schedule)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        rows = torch.randn(2, 5, generator=generator).to(torch.bfloat16 if bf16 else torch.float32)
        engine.backward(engine(rows).float().square().mean())
        engine.step()
    engine.save_checkpoint(path, client_state=CLIENT)
    if stage < 3:
        # DeepSpeed links slots after the first group's first step, when other groups have none yet.
        for group, flat in zip(
            engine.optimizer.bit16_groups, engine.optimizer.single_partition_of_fp32_groups, strict=True
        ):
            lazy_init_hp_params_optimizer_state(group, flat, optimizer.state)
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found[f"model.{name}"] = safe_get_full_fp32_param(parameter)
            for slot in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.0.{name}.{slot}"] = safe_get_full_optimizer_state(parameter, slot)
    return {name: tensor.clone() for name, tensor in found.items()}
