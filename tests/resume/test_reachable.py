"""What data sets, modules and callbacks keep of their own goes on after a resume, or that is said."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import types
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset

from lightning_shard.resume import reachable, rng
from lightning_shard.resume.loader import Draws
from lightning_shard.resume.rng import decoded, encoded
from lightning_shard.resume.wrap import resumable
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.resume.support import Numbers, through_file

LENGTH = 20


class Congruential:
    """A generator of its own kind, with a state of any kind."""

    def __init__(self, state: Any) -> None:
        self.state, self.cut = state, slice(None)

    def __call__(self) -> int:
        if isinstance(self.state, dict):
            self.state["now"] = self.state["now"] * 31 % 1009
            return self.state["now"]
        if isinstance(self.state, tuple | list):
            self.state = type(self.state)((self.state[0] * 31 % 1009, self.state[1] + 1))
            return self.state[0]
        self.state = self.state * 31 % 1009
        return int(self.state)


class Unbound:
    """As proxies of what is not there yet."""

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("nothing is bound")


class Counting(Numbers):
    """Has numbers of what it holds, and how many samples it has given."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.proxy = Unbound()
        states: list[Any] = [5, 5.0, np.uint64(5), (5, 0), [5, 0], {"now": 5}, torch.tensor(5), np.array(5)]
        self.parts = [Congruential(state) for state in states]

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return torch.tensor([index, self.calls, *(part() for part in self.parts)], dtype=torch.float64)


class Opening(Counting):
    """Opens what a number is of: without the one, the other would be wrong."""

    file: Any = None
    shard: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.shard is None:
            self.shard, self.file = 3, object()
        assert self.file is not None
        return super().__getitem__(index)


class Caching(Numbers):
    """Opens files as they are needed, and nothing else."""

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.file: Any = None
        self.worker: Any = None
        self.is_open = False
        self.samples: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file, self.worker, self.is_open = object(), 0, True
        return self.samples.setdefault(index, torch.tensor([index]))


class Plain(Numbers):
    def __init__(self) -> None:
        super().__init__(LENGTH)


class Class(Numbers):
    calls = 0

    def __init__(self) -> None:
        super().__init__(LENGTH)

    def __getitem__(self, index: int) -> Any:
        Class.calls += 1
        return torch.tensor([index, Class.calls])


def make(dataset: Any, ranks: tuple[int, int] = (1, 0), *, seeded: bool = False, **options: Any) -> Any:
    sampler = DistributedSampler(dataset, *ranks, seed=3)
    draws = Draws(seed=3, epoch=lambda: 0) if seeded else None
    stock = DataLoader(dataset, 2, sampler=sampler, **options)
    return resumable(stock, world_size=ranks[0], rank=ranks[1], draws=draws)


def rows(batches: Any) -> list[list[float]]:
    return [row for batch in batches for row in batch.tolist()]


def resume(loader: Any, state: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader.load_state_dict(through_file(state))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("batches", [1, 4, LENGTH // 2])
@pytest.mark.parametrize("seeded", [False, True])
def test_counters_of_the_training_process_go_on(seeded: bool, batches: int) -> None:
    loader = make(Counting(), seeded=seeded)
    first = rows(itertools.islice(loader, batches))
    state = loader.state_dict()
    rest = rows(loader) if batches == LENGTH // 2 else None
    resumed = make(Counting(), seeded=seeded)
    assert resume(resumed, state) == []
    assert len({row[2] for row in first}) == len(first)
    assert (rest or rows(make(Counting(), seeded=seeded))) == ([] if rest else first) + rows(resumed)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10**9))


class Late(Counting):
    """Draws, and counts something else from some sample on; what it holds is looked through at times alone."""

    def __init__(self, first: int = 10**9) -> None:
        super().__init__()
        self.first, self.late, self.own = first, Congruential(5), random.Random(3)

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index)
        late = self.late() if index >= self.first else 0
        return torch.cat([row, torch.tensor([late, self.own.random()])])


@pytest.mark.parametrize(("batches", "first", "lost"), [(6, 99, ""), (10, 2, ""), (9, 12, ""), (7, 13, "late.state")])
def test_a_batch_that_was_fetched_ahead_is_not_counted(batches: int, first: int, lost: str) -> None:
    def made() -> Any:
        stock = DataLoader(Late(first), 2, sampler=Endless())
        return resumable(stock, world_size=1, rank=0)

    loader = made()
    assert loader.lookahead == 1
    seen = rows(itertools.islice(loader, batches))
    resumed = made()
    told = resume(resumed, loader.state_dict())
    assert [lost in message for message in told] == [True] * bool(lost)
    if not lost:
        assert seen[:-2] + rows(itertools.islice(resumed, 3)) == rows(itertools.islice(made(), batches + 2))


def test_all_that_a_dataset_holds_is_looked_through_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    walk = reachable.reachable
    monkeypatch.setattr(reachable, "reachable", lambda *of: (looks.append(1), walk(*of))[1])
    for _ in itertools.islice(resumable(DataLoader(Late(), sampler=Endless()), world_size=1, rank=0), 1000):
        pass
    assert len(looks) < 30


class Awkward(Numbers):
    """Numbers whose type counts, of an object that takes none, beside one that has no length after all."""

    @dataclasses.dataclass(frozen=True)
    class State:
        value: Any

    class Closed:
        def __len__(self) -> int:
            raise ValueError("closed")

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.state, self.closed = self.State(np.uint64(2**63)), self.Closed()

    def __getitem__(self, index: int) -> Any:
        with np.errstate(over="ignore"):
            value = self.state.value * np.uint64(6364136223846793005) + np.uint64(1)
        object.__setattr__(self.state, "value", value)
        return torch.tensor([index, int(value) >> 32])


def test_numbers_keep_their_type() -> None:
    loader = make(Awkward())
    first = rows(itertools.islice(loader, 3))
    resumed = make(Awkward())
    assert resume(resumed, loader.state_dict()) == []
    assert type(resumed.dataset.state.value) is np.uint64
    assert first + rows(resumed) == rows(make(Awkward()))
    # So do those of samplers, on the way into a checkpoint and out of it.
    assert type(decoded(through_file(encoded({"state": np.uint64(5)})))["state"]) is np.uint64


def test_what_others_hold_too_is_written_in_place() -> None:
    def made() -> Any:
        return types.SimpleNamespace(a=[1, 2], b={"n": 1}, c=torch.tensor([1, 2]), d=np.array([1, 2]))

    saved, here = made(), made()
    numbers, shared = reachable.Numbers({"held": saved}), dict(vars(here))
    saved.a.append(3)
    saved.b["m"] = 2
    saved.c += 1
    saved.d += 1
    reachable.Numbers({"held": here}).write(numbers.read())
    assert repr(here) == repr(saved) != repr(made())
    assert all(vars(here)[name] is value for name, value in shared.items())


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


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (Counting, {"num_workers": 1}, "numbers in its worker processes"),
        (Counting, {"num_workers": 1, "seeded": True}, "numbers in its worker processes"),
        (Counting, {"ranks": (2, 0)}, "dataset.calls"),
        (Opening, {}, "dataset.calls"),
        (Class, {}, "dataset.calls"),
        (Caching, {}, None),
        (Caching, {"num_workers": 1}, None),
        (Plain, {"num_workers": 1}, None),
    ],
)
def test_counters_that_do_not_go_on_are_said_once(dataset: Any, options: Any, said: str | None) -> None:
    loader = make(dataset(), **options)
    for _ in itertools.islice(loader, 4):
        pass
    told = resume(make(dataset(), **{**options, "ranks": (1, 0)}), loader.state_dict())
    assert [said in message for message in told if said] == [True] * bool(said)
    assert not said or "If samples depend on it" in told[0]
    if said is None:
        assert told == []


def test_what_is_opened_is_not_taken_for_open() -> None:
    loader = make(Opening())
    next(iter(loader))
    resumed = make(Opening())
    resume(resumed, loader.state_dict())
    assert rows(resumed)


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
