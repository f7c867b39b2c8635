"""A module's own `on_load_checkpoint` and `load_state_dict` act on a checkpoint's tensors as without sharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import CheckpointError, CheckpointMismatchError, full_tensor, load_from_checkpoint
from lightning_shard.checkpoint.state_dict import _given_to_torch
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer

State = dict[str, Any]
ROWS = 6


class Old(pl.LightningModule):
    rows = ROWS
    last = "head"
    edit: Callable[[Any, State], object] = lambda self, checkpoint: None

    def configure_model(self) -> None:
        if not hasattr(self, "embed"):
            self.embed = nn.Embedding(self.rows, 5)
            setattr(self, self.last, nn.Linear(5, 3))

    def training_step(self, batch: Tensor) -> Tensor:
        return getattr(self, self.last)(self.embed(batch)).square().sum()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([torch.arange(ROWS)] * 8, batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class New(Old):
    def on_load_checkpoint(self, checkpoint: State) -> None:
        assert set(checkpoint["state_dict"]) == {"embed.weight", "head.weight", "head.bias"}
        self.edit(checkpoint)


class Overriding(Old):
    last = "classifier"

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state = {name.replace("head.", "classifier."): tensor for name, tensor in state_dict.items()}
        return super().load_state_dict({**state, "embed.weight": state["embed.weight"] * 2}, strict=strict)


class ByHand(Old):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return None


def made(cls: type[Old], edit: Any = None, **attributes: Any) -> Old:
    pl.seed_everything(3, verbose=False)
    module = cls()
    for name, value in attributes.items():
        setattr(module, name, value)
    if edit is not None:
        module.edit = edit
    return module


def fit(module: Old, strategy: str, precision: str, steps: int, path: str | None = None) -> tuple[State, Any]:
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=steps)
    trainer.fit(module, ckpt_path=path)
    return _full(trainer), trainer


def loaded(module: Old, strategy: str, precision: str, path: str) -> State:
    """The tensors of a module for an evaluation of the checkpoint."""
    trainer = quiet_trainer(strategy=strategy, precision=precision)
    module.validation_step = lambda batch: None  # type: ignore[method-assign]
    trainer.validate(module, module.train_dataloader(), ckpt_path=path, verbose=False)
    return _full(trainer)


def _full(trainer: pl.Trainer) -> State:
    return {name: full_tensor(trainer, name) for name in trainer.strategy.checkpoints.state_dict()}


def renamed(checkpoint: State) -> None:
    state = checkpoint["state_dict"]
    for name in ("weight", "bias"):
        state[f"classifier.{name}"] = state.pop(f"head.{name}")


def grown(checkpoint: State) -> None:
    state = checkpoint["state_dict"]
    assert state["embed.weight"].shape == (ROWS, 5)
    state["embed.weight"] = torch.cat([state["embed.weight"], state["embed.weight"].new_ones(2, 5)])
    state["head.bias"][1] = 7.0


def deleted(checkpoint: State) -> None:
    del checkpoint["state_dict"]["head.bias"]


def run(strategy: str, precision: str, folder: str) -> None:
    path = f"{folder}/old.ckpt"
    stored, trainer = fit(made(Old), strategy, precision, 2)
    trainer.save_checkpoint(path)
    longer, _ = fit(made(Old), strategy, precision, 4)

    # The optimizer's state goes with a name.
    found, _ = fit(made(New, renamed, last="classifier"), strategy, precision, 4, path)
    assert all(torch.equal(longer[name.replace("classifier", "head")], tensor) for name, tensor in found.items())

    found = loaded(made(New, grown, rows=ROWS + 2), strategy, precision, path)
    more = stored["embed.weight"].new_ones(2, 5)
    assert torch.equal(found["embed.weight"], torch.cat([stored["embed.weight"], more]))
    assert found["head.bias"].tolist() == [stored["head.bias"][0], 7.0, stored["head.bias"][2]]
    assert torch.equal(found["head.weight"], stored["head.weight"])
    state = r"optimizer 0 has of embed\.weight is of a parameter of shape \(6, 5\), which is \(8, 5\) here: "
    with pytest.raises(CheckpointMismatchError, match=state):
        fit(made(New, grown, rows=ROWS + 2), strategy, precision, 4, path)

    fresh, _ = fit(made(Old), strategy, precision, 0)
    found = loaded(made(New, deleted, strict_loading=False), strategy, precision, path)
    assert torch.equal(found["head.bias"], fresh["head.bias"])
    assert torch.equal(found["head.weight"], stored["head.weight"])
    with pytest.raises(CheckpointMismatchError, match=r"missing in the checkpoint \(1\): model\.head\.bias"):
        loaded(made(New, deleted), strategy, precision, path)

    begins_anew = made(New, lambda checkpoint: checkpoint.update(optimizer_states=[]))
    found, trainer = fit(begins_anew, strategy, precision, 2, path)
    assert all(torch.equal(stored[name], tensor) for name, tensor in found.items())
    assert full_tensor(trainer, "head.bias", "exp_avg") is None

    # What people write against heads of another size.
    module = made(New, rows=ROWS + 2)

    def where_it_fits(checkpoint: State) -> None:
        state, own = checkpoint["state_dict"], module.state_dict()
        state.update({name: own[name] for name in state if state[name].shape != own[name].shape})

    module.edit = where_it_fits
    if "stage_3" in strategy:
        with pytest.raises(CheckpointMismatchError, match=r"state_dict\(\), which has no values of it under this"):
            loaded(module, strategy, precision, path)
    else:
        fresh, _ = fit(made(Old, rows=ROWS + 2), strategy, precision, 0)
        found = loaded(module, strategy, precision, path)
        assert torch.equal(found["embed.weight"], fresh["embed.weight"])
        assert torch.equal(found["head.weight"], stored["head.weight"])

    found = loaded(made(Overriding), strategy, precision, path)
    assert torch.equal(found["embed.weight"], 2 * stored["embed.weight"])
    assert torch.equal(found["classifier.weight"], stored["head.weight"])
    with pytest.raises(CheckpointError, match=r"ByHand\.load_state_dict gives torch nothing to load"):
        loaded(made(ByHand), strategy, precision, path)
    with pytest.raises(CheckpointError, match=r"put a list under 'notes' into the state_dict"):
        loaded(made(New, lambda checkpoint: checkpoint["state_dict"].update(notes=[])), strategy, precision, path)


NAMES = [f"shard_{name}_aligned" for name in ("fsdp", "deepspeed_stage_3", "ddp", "deepspeed_stage_2")]


@pytest.mark.matrix
@pytest.mark.parametrize("precision", sampled(["bf16-true", "32-true"], 0))
@pytest.mark.parametrize("strategy", sampled(NAMES, 0, 1))
def test_what_a_module_makes_of_the_state_dict_is_loaded(strategy: str, precision: str, tmp_path: Path) -> None:
    run_distributed(run, 2, strategy, precision, str(tmp_path))


def _built(path: str) -> State:
    class Reader(New):
        last = "classifier"

        def on_load_checkpoint(self, checkpoint: State) -> None:
            grown(checkpoint)
            renamed(checkpoint)

    Reader.rows = ROWS + 2
    module = load_from_checkpoint(Reader, path)
    assert type(module) is Reader
    return dict(module.state_dict())


def _save(path: str) -> State:
    stored, trainer = fit(made(Old), "shard_fsdp", "32-true", 2)
    trainer.save_checkpoint(path)
    return stored


def test_load_from_checkpoint_follows_it_too(tmp_path: Path) -> None:
    stored, _ = run_distributed(_save, 2, str(tmp_path / "old.ckpt"))
    found = _built(str(tmp_path / "old.ckpt"))
    assert torch.equal(found["embed.weight"], torch.cat([stored["embed.weight"], torch.ones(2, 5)]))
    assert found["classifier.bias"][1] == 7.0
    assert torch.equal(found["classifier.weight"], stored["head.weight"])


class Lenient(nn.Linear):
    strict = False

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({"weight": state_dict["old"]}, strict=self.strict)


def test_what_an_override_gives_torch_is_noted_and_not_loaded() -> None:
    module, given = Lenient(2, 2), torch.full((2, 2), 3.0)
    before = module.weight.detach().clone()
    found = _given_to_torch(module, {"old": given}, strict=True, missing=["invented"])
    assert list(found) == ["weight"]
    assert found["weight"] is given
    module.strict = True
    with pytest.raises(RuntimeError, match="invented"):
        _given_to_torch(module, {"old": given}, strict=True, missing=["invented"])
    assert torch.equal(module.weight, before)
    assert not module._load_state_dict_pre_hooks
