"""A DataLoader over a map-style dataset whose position in the epoch is its state."""

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_shard.resume import rng
from lightning_shard.resume import shape as shapes
from lightning_shard.resume.rng import generators_in
from lightning_shard.resume.sample_seeds import SeededSamples
from lightning_shard.resume.samplers import Epoch, Generators, IndexSource, from_saved, to_saved
from lightning_shard.resume.shape import DelegatingLoader, has_state
from lightning_shard.text import listed

Draws = Callable[[], tuple[int, int]]
"""Gives the seed, the same on all ranks, and the training loop's epoch, by which samples' random numbers are seeded."""


@dataclasses.dataclass
class _Run:
    shape: shapes.Shape
    begun: dict[str, Any]  # The part of the state from the beginning of the iteration.
    start: int = 0
    start_batches: int = 0
    batches: int = 0
    ended: bool = False


class ResumableLoader(DelegatingLoader):
    """A map-style DataLoader that resumes after its last batch.

    It yields `inner`'s batches. torch's iterator is made at the first ``next``, when the sampler's epoch is known.
    After :meth:`load_state_dict` the next iteration yields the rest of the epoch, in the order in which it was begun.
    Its length stays the full epoch's. Setting another epoch before that starts the other one.

    The order of an epoch is drawn at its first batch. On a resume it is drawn again from the states, at the epoch's
    start, of the samplers and of the generators: the loader's own, or the global ones of torch, numpy and python, which
    are put back. A warning says that the order differs, for example if a sampler keeps more than its ``state_dict``
    has. Without workers a dataset's ``state_dict`` and ``load_state_dict`` are used too. Random numbers that it draws
    in worker processes are the same after a resume with `draws`.

    `lookahead` is the number of batches that the training loop fetches ahead. `world_size` and `rank` count the ranks
    that read data of their own. The sampler takes its indices from `inner_sampler`.
    """

    _own = frozenset(
        {"lookahead", "_source", "_generators", "_draws", "_seeded", "_samples", "_owners"}
        | {"_world_size", "_rank", "_pending", "_run"}
    )

    def __init__(
        self, inner: DataLoader[Any], world_size: int, rank: int, inner_sampler: Any = None, draws: Draws | None = None
    ) -> None:
        batched = inner.batch_sampler is not None
        source = IndexSource(inner.batch_sampler if batched else inner.sampler)
        samplers = [source.full, inner.sampler, getattr(source.full, "sampler", None), inner_sampler]
        samplers = list({id(sampler): sampler for sampler in samplers if sampler is not None}.values())
        inner = copy.copy(inner)
        # A DataLoader refuses to have its samplers set. This copy belongs to this object.
        inner.__dict__["batch_sampler" if batched else "sampler"] = source
        samples: Any = inner.dataset
        super().__init__(inner)
        self._draws, self._samples, self._source = draws, samples, source
        self._seeded = SeededSamples(samples, workers=inner.num_workers > 0) if draws is not None else None
        if self._seeded is not None:
            inner.__dict__["dataset"] = self._seeded
        self._generators, self._owners = Generators(inner, samplers), [*samplers, samples]
        self.lookahead = int(shapes.length_of(inner) is None)
        self._world_size, self._rank = world_size, rank
        self._pending: dict[str, Any] | None = None
        self._run: _Run | None = None

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        return self._samples

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """The original, not the `IndexSource`."""
        return self._source.full if self._inner.batch_sampler is not None else None

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The original, or the sampler in a stock batch sampler that was given, which the loader does not know."""
        if self._inner.batch_sampler is None:
            return self._source.full
        return self._inner.sampler if self._source.items is self._source.full else self._source.items

    @property
    def batches_done(self) -> int:
        """Batches of the epoch that are done, after loading in units of this loader."""
        if self._pending is None:
            return 0 if self._run is None else self._run.start_batches + self._run.batches - self._ahead(self._run)
        return self._batches_behind(self._pending) if shapes.is_midway(self._pending) else 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was yielded, as plain values and tensors. Only random numbers differ
        between ranks. On loading, each rank should get its own state, or rank 0's if it did not exist.
        """
        if self._pending is not None:
            return dict(self._pending)
        run = self._run or self._new_run({"rng": None, "generators": []}, None, seeded=True)
        left, ahead = run.shape.batches_left(run.start), self._ahead(run)
        done = run.batches - ahead
        ended = self._run is not None and (run.ended or (left is not None and done >= left))
        now = self._generators.snapshot(common=False)
        return {
            **run.begun,
            "kind": run.shape.kind,
            "samples": run.shape.position(run.start, done),
            "batches": done + run.start_batches,
            "finished": ended,
            "length": run.shape.length,
            "world_size": self._world_size,
            "replicas": run.shape.replicas,
            "batch_size": run.shape.batch_size,
            **self._order,
            **{f"{name}_now": state for name, state in now.items()},
            "ahead": ahead,
            "order": self._source.order,
            "dataset": to_saved(self._samples.state_dict()) if self._saves_samples else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`, after a finished epoch with the next one. Ignores torchdata's state. DataError: this
        loader can't finish the epoch, for another sampler, number of samples, or world size without a common order.
        """
        if "kind" not in state:
            return
        state = {"states_now": [], **state}  # format 1 lacks it
        if shapes.is_midway(state):
            shapes.refuse_other_data(state, self._shape, self._world_size, self._order)
            set_epoch = getattr(self._epoch_sampler(), "set_epoch", None)
            if set_epoch is not None and state["epoch"] is not None:
                set_epoch(state["epoch"])
        self._generators.restore({name: state[f"{name}_now"] for name in ("generators", "states")})
        if self._saves_samples and state.get("dataset") is not None:
            self._samples.load_state_dict(from_saved(state["dataset"]))
        if self._rank == 0:
            for message in self._differences(state):
                warnings.warn(message, stacklevel=2)
        self._pending, self._run = state, None

    @property
    def _saves_samples(self) -> bool:
        """Whether the dataset has a state in this process."""
        return self._inner.num_workers == 0 and has_state(self._samples)

    def _ahead(self, run: _Run) -> int:
        """Number of yielded batches that were not trained on."""
        return 0 if run.ended else min(self.lookahead, run.batches)

    def _differences(self, state: dict[str, Any]) -> Iterator[str]:
        """Warnings of differences from a run without the interruption."""
        for name, owner in (("seed", "seed_everything"), ("shuffle", "the DataLoader")):
            saved, own = state.get(name), self._order[name]
            if saved != own and None not in (saved, own):
                yield (
                    f"the order of the data is of {name} {saved} in the checkpoint, and of {own} here: an epoch that"
                    f" was begun is finished in the one, and those after it follow the other. Give {owner} {saved} to"
                    " go on as if the run had not been interrupted."
                )
        if state.get("ahead") and shapes.is_midway(state):
            yield (
                "a sampler or a dataloader has no length, so that the loop fetches a batch ahead of the steps: random"
                " numbers that samples draw, or a sampler without a length from the global generators, are others after"
                " resuming. Give it a length to go on as if the run had not been interrupted."
            )
        stateless = [owner for owner in self._owners if not has_state(owner)]
        unsaved = [name for owner in stateless for name in generators_in(owner, "generator")]
        if has_state(self._samples) and not self._saves_samples:
            unsaved.append(f"{type(self._samples).__name__}.state_dict() in worker processes")
        if unsaved:
            yield (
                f"the state of samplers and the dataset in {listed(unsaved)} is in no checkpoint and begins again, and"
                " so the order of the data or random numbers of samples. Give them state_dict() and load_state_dict(),"
                " and the dataset num_workers=0 or torchdata's StatefulDataLoader, to go on from their states."
            )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        run, batches = self._begin_epoch()
        for batch in batches:
            run.batches += 1
            yield batch
        run.ended = True

    def _new_run(self, generators: dict[str, Any], draws: tuple[int, int, int] | None, *, seeded: bool) -> _Run:
        """A run with the ``generators`` at its start. ``draws`` seed samples' random numbers: seed, epoch, iteration in
        the epoch. ``seeded``: whether the iterator draws a seed for its workers (persistent ones draw it once).
        """
        return _Run(self._shape, {"epoch": self._epoch, "seeded": seeded, "draws": draws, **generators})

    def _begin_epoch(self) -> tuple[_Run, Iterator[Any]]:
        loaded, self._pending = self._pending, None
        inner, generators = self._inner, self._generators
        epoch = self._epoch
        begun = loaded if loaded is not None and shapes.is_midway(loaded) else None
        other_epoch = begun is not None and None not in (begun["epoch"], epoch) and begun["epoch"] != epoch
        resumed = None if other_epoch else begun
        keeps_workers = inner.persistent_workers and inner.num_workers > 0
        creates = not keeps_workers or self._iterator is None
        now = generators.snapshot()
        if resumed:
            generators.restore(resumed)
            seeded = bool(resumed["seeded"])
        else:
            # In an uninterrupted run the persistent workers of a finished epoch would still be there.
            seeded = not keeps_workers or (creates and not (loaded and loaded["finished"]))
        run = self._new_run(generators.snapshot(), self._next_draws(resumed, loaded), seeded=seeded)
        if resumed:
            run.start, run.start_batches = resumed["samples"], self._batches_behind(resumed)
        if resumed or (creates and not seeded):
            build = functools.partial(self._rest, resumed) if resumed else self._source.epoch
            batches = self._source.iterate(inner, build, generators, unseeded=creates and not seeded)
            self._compare_order(resumed)
        else:
            batches = iter(inner)
        if resumed:
            # The loader's own generators go on from the epoch's start.
            rng.set_rng_state(now["rng"])
        self._run = run
        return run, batches

    def _compare_order(self, resumed: dict[str, Any] | None) -> None:
        if resumed is None or resumed["world_size"] != self._world_size or self._rank != 0:
            return
        before, now = resumed.get("order"), self._source.order
        if None not in (before, now) and before != now:
            warnings.warn(
                f"{type(self._source.items).__name__} gives another order than before the checkpoint: samples of this"
                " epoch are repeated and others missed. Give the sampler state_dict() and load_state_dict(), or resume"
                " from a checkpoint of an epoch's end.",
                stacklevel=2,
            )

    def _next_draws(self, resumed: dict[str, Any] | None, loaded: dict[str, Any] | None) -> tuple[int, int, int] | None:
        """Seed the samples' random numbers of this iteration. ``loaded`` is the iteration before it, or ``resumed``."""
        if self._draws is None or self._seeded is None:
            return None
        (seed, epoch), cycle = self._draws(), 0
        if resumed and resumed.get("draws"):
            seed, epoch, cycle = resumed["draws"]
        elif (before := loaded["draws"] if loaded else self._run and self._run.begun["draws"]) and before[1] == epoch:
            cycle = before[2] + 1
        self._seeded.seed_iteration(seed, epoch, cycle)
        return seed, epoch, cycle

    def _rest(self, state: dict[str, Any]) -> Epoch:
        """The rest of the epoch after the position of `state`."""
        source, start = self._source, state["samples"]
        if state["kind"] != "distributed":
            return source.epoch(start)
        dealt: Any = source.items
        ranks = {"rank": dealt.rank, "world_size": dealt.num_replicas, "drop_last": dealt.drop_last}
        share = functools.partial(shapes.rank_share, **ranks)
        return source.epoch(start, shapes.of_all_ranks(dealt, state["seed"], state["shuffle"]), share)

    def _batches_behind(self, state: dict[str, Any]) -> int:
        # Counted back from the end, so that the epoch ends with the loader's length.
        shape = self._shape
        total, left = shape.batches_left(0), shape.batches_left(state["samples"])
        return int(state["batches"]) if total is None or left is None else total - left

    @property
    def _shape(self) -> shapes.Shape:
        return shapes.shape_of(self._source.items, self._batches)

    @property
    def _batches(self) -> Any:
        """The batch sampler, which may replace the sampler if the batch size is None."""
        return self.batch_sampler if self._source.items is self._source.full else self._source.full

    @property
    def _epoch(self) -> int | None:
        """The epoch that the training loop has set, if any."""
        sampler = self._epoch_sampler()
        return getattr(sampler, "epoch", None) if hasattr(sampler, "set_epoch") else None

    @property
    def _order(self) -> dict[str, Any]:
        return {name: getattr(self._epoch_sampler(), name, None) for name in ("seed", "shuffle")}

    def _epoch_sampler(self) -> Any:
        """The sampler, or the one under a batch sampler, whichever has ``set_epoch``."""
        nested = getattr(self._batches, "sampler", None)
        return next((s for s in (nested, self.sampler) if hasattr(s, "set_epoch")), self.sampler)
