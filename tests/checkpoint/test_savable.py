"""Optimizers whose state no checkpoint can have, or not all of it, are told of before a fit begins."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shard.checkpoint.optimizer_state import check_savable
from lightning_shard.errors import CheckpointError, ConfigurationError
from lightning_shard.tensors.names import fqns
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


class Histories(torch.optim.SGD):
    """Keeps an object of its own for each parameter."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = Histories


class Wrapping(torch.optim.SGD):
    """As Lookahead and SAM hold the optimizer that they step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.base = torch.optim.AdamW(self.param_groups, lr)


OWN = {"Histories": Histories, "Wrapping": Wrapping}


def check(kind: type[torch.optim.Optimizer], **kwargs: Any) -> str:
    net = nn.Linear(4, 4)
    if dist.get_world_size() > 1:
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, before = kind(net.parameters(), **kwargs), torch.get_rng_state()
    slots = {key: dict(value) for key, value in optimizer.state.items()}
    try:
        check_savable([optimizer], fqns(net))
    except ConfigurationError as error:
        return str(error)
    assert optimizer.state == slots
    assert torch.equal(torch.get_rng_state(), before)
    return "can be saved"


def check_all() -> dict[str, str]:
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    kinds = {name: kind for name, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer)}
    del kinds["Optimizer"], kinds["Muon"]  # a base class; not for vectors
    return {name: check(kind, lr=0.1) for name, kind in {**kinds, **OWN}.items()}


def test_an_optimizer_whose_state_no_checkpoint_can_have_is_refused_before_it_steps():
    for ranks in (1, 2):
        (found, *_) = run_distributed(check_all, ranks)
        refused = {name: said for name, said in found.items() if said != "can be saved"}
        assert refused.keys() == OWN.keys() | (set() if ranks == 1 else {"LBFGS", "Adafactor"})
        assert "the state of Histories can't be saved: the trainer's state" in refused["Histories"]
        assert "the state of Wrapping can't be saved: it steps AdamW" in refused["Wrapping"]
        if ranks == 2:
            assert "the state of LBFGS can't be saved: optimizer.0.parameter." in refused["LBFGS"]
            assert "row_var has shape (64, 1), its parameter (64, 68)" in refused["Adafactor"]


class Counting(torch.optim.SGD):
    """Keeps counts of its own: one, and one that is many numbers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count, self.steps = [0.0] * 100, 0

    def step(self, closure: Any = None) -> Any:
        self.count[self.steps] = 1.0
        self.steps += 1
        return super().step(closure)


def test_what_an_optimizer_keeps_beside_its_state_is_told(recwarn):
    net = nn.Linear(4, 4)
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS):
        check_savable([kind(net.parameters(), lr=0.1)], fqns(net))
    assert not recwarn.list
    with pytest.warns(UserWarning, match="Counting keeps count outside of its `state`"):
        check_savable([Counting(net.parameters(), 0.1)], fqns(net))


class Remembers(Callback):
    """Keeps what ``weights_only=True`` does not load."""

    def __init__(self, first: Any = ()) -> None:
        self.first, self.losses, self.norms = first, deque[float](maxlen=3), np.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "losses": self.losses, "norms": self.norms}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.global_step))
        self.norms = np.append(self.norms, trainer.global_step)


def remember(folder: Any, first: Any = (), **options: Any) -> Remembers:
    kept, saves = Remembers(first), ModelCheckpoint(dirpath=folder, save_last=True, filename=options.pop("name", None))
    run = {"max_steps": 2, "enable_checkpointing": True, "callbacks": [kept, saves]}
    quiet_trainer(strategy="shard_ddp", devices=1, **run).fit(TinyLM(), loader(), **options)
    return kept


class Unsavable(TinyLM):
    def configure_optimizers(self) -> Any:
        return Histories(self.parameters(), lr=0.1)


def remember_and_go_on(folder: Path) -> None:
    remember(folder)
    kept = remember(folder, ckpt_path=folder / "last.ckpt")
    assert repr((kept.losses, kept.norms)) == "(deque([1.0, 2.0], maxlen=3), array([1., 2.]))"
    for first, name in ((folder, None), (np.zeros(1), "{step}.full")):
        with pytest.raises(CheckpointError, match="callbacks/Remembers/first: "):
            remember(folder / "none", first, name=name)
    module, saves = Unsavable(), ModelCheckpoint(dirpath=folder / "none")
    trainer = quiet_trainer(strategy="shard_ddp", devices=1, enable_checkpointing=True, callbacks=[saves])
    with pytest.raises(ConfigurationError, match="the state of Histories can't be saved: "):
        trainer.fit(module, loader())
    assert not module.losses
    assert not (folder / "none").exists()


def test_a_callbacks_arrays_and_containers_go_on_and_what_can_not_is_refused_at_the_start(tmp_path):
    run_distributed(remember_and_go_on, 1, tmp_path)
