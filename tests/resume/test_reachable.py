"""What data sets, modules and callbacks keep of their own goes on after a resume, or that is said."""

from __future__ import annotations

import functools
import random
import types
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from lightning_shard.resume import reachable, rng
from lightning_shard.resume.wrap import resumable
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.resume.support import Numbers, through_file

LENGTH = 20


class Unbound:
    """As proxies of what is not there yet."""

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("nothing is bound")


class Plain(Numbers):
    def __init__(self) -> None:
        super().__init__(LENGTH)


def make(dataset: Any, ranks: tuple[int, int] = (1, 0), *, seeded: bool = False, **options: Any) -> Any:
    sampler = DistributedSampler(dataset, *ranks, seed=3)
    draws = (lambda: (3, 0)) if seeded else None
    stock = DataLoader(dataset, 2, sampler=sampler, **options)
    return resumable(stock, world_size=ranks[0], rank=ranks[1], draws=draws)


def resume(loader: Any, state: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader.load_state_dict(through_file(state))
    return [str(warning.message) for warning in caught]


def test_generators_that_are_gone_or_of_another_kind_are_not_set() -> None:
    saved = {name: rng.generator_state(random.Random(seed)) for name, seed in (("a", 1), ("b", 2), ("c", 3))}
    here = {"a": random.Random(4), "b": np.random.default_rng(5)}
    assert [name for name, state in saved.items() if not rng.set_generator_state(here.get(name), state)] == ["b", "c"]
    assert here["a"].random() == random.Random(1).random()


NESTED = random.Random(1)


def test_generators_are_found_in_what_functions_hold_and_name() -> None:
    own = [random.Random(number) for number in range(3)]

    def drawing() -> Any:
        return lambda: NESTED.random()

    drawing.rng = own[0]  # type: ignore[attr-defined]
    everywhere = [torch.default_generator, random.random.__self__, np.random.rand.__self__]  # type: ignore[attr-defined]
    found = reachable.generators_of(everywhere, functools.partial(drawing, own[1], rng=own[2]))
    assert {id(generator) for generator in found} == {id(generator) for generator in (*own, NESTED)}


GLOBAL, ELSEWHERE = random.Random(1), types.ModuleType("elsewhere")
ELSEWHERE.__dict__["rng"] = np.random.default_rng(2)


class Jitter:
    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        self.own = random.Random(4)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return (torch.tensor([index + self.own.random()]),)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.jitter, self.noisy = Jitter(3), Noisy()

    def val_dataloader(self) -> Any:
        return DataLoader(self.noisy)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(12.0)[:, None]), 2)

    def on_after_batch_transfer(self, batch: Any, _: int) -> Any:
        return [batch[0] + self.jitter.generator.random()]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.jitters = [Jitter(5)]
        self.proxy = Unbound()
        self.events: list[float] = []

    @property
    def noise(self) -> float:
        return self.jitters[0].generator.random() + GLOBAL.random()

    def training_step(self, batch: Any, _: int) -> Any:
        self.events += [batch[0].sum().item(), self.noise + ELSEWHERE.rng.random()]
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.events += [batch[0].sum().item(), self.noise]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(direct: bool, ckpt_path: str | None = None, save: int | None = None) -> list[float]:
    pl.seed_everything(1, verbose=False)
    GLOBAL.seed(1)
    ELSEWHERE.rng = np.random.default_rng(2)
    own, module = random.Random(6), Net()

    def note(trainer: Any, *_: Any) -> None:
        module.events.append(own.random())
        if trainer.global_step == save:
            trainer.save_checkpoint(f"saved{direct}.ckpt")
            module.events.clear()

    calls = LambdaCallback(on_train_batch_end=note)
    trainer = quiet_trainer(strategy="shard_ddp", max_epochs=2, val_check_interval=2, callbacks=[calls])
    if direct:
        data: Any = {"train_dataloaders": Data().train_dataloader(), "val_dataloaders": Data().val_dataloader()}
    else:
        data = {"datamodule": Data()}
    trainer.fit(module, **data, ckpt_path=ckpt_path)
    return module.events


def _goes_on() -> list[Any]:
    return [(_fit(direct, save=5), _fit(direct, f"saved{direct}.ckpt")) for direct in (False, True)]


def test_generators_of_all_that_a_fit_calls_go_on() -> None:
    """In globals, also of modules, closures, properties and nested objects; of evaluation's data sets too."""
    [runs] = run_distributed(_goes_on, 1)
    for whole, resumed in runs:
        assert whole == resumed
        assert len(whole) > 20
