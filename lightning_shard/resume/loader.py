"""A DataLoader over a map-style dataset that knows how far it is and can go on from there."""

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_shard.resume import rng
from lightning_shard.resume import shape as shapes
from lightning_shard.resume.draws import DrawingDataset
from lightning_shard.resume.reachable import generators_of
from lightning_shard.resume.samplers import Epoch, Generators, IndexSource
from lightning_shard.resume.shape import DelegatingLoader

Draws = Callable[[], tuple[int, int]]
"""Gives what random numbers of samples are seeded by, besides the sample's index: a seed, the same on all ranks, and
the epoch that the training loop is in."""


@dataclasses.dataclass
class _Run:
    shape: shapes.Shape
    begun: dict[str, Any]  # The part of the state that says how the iteration was begun.
    start: int = 0
    start_batches: int = 0
    batches: int = 0
    ended: bool = False


class ResumableLoader(DelegatingLoader):
    """A map-style DataLoader that goes on after the last batch that it gave out.

    It yields what `inner` would. torch's iterator is made at the first ``next``, when the epoch of the sampler is
    known. After :meth:`load_state_dict` the next iteration gives what is left of the epoch (the length stays the whole
    one's), in the order in which it was begun; setting another epoch before that starts the other one.

    The order of an epoch is drawn when its first batch is asked for, and again on a resume: from the states at the
    epoch's start of the generators (torch's, numpy's and python's global ones, without a trace in these, or the
    loader's own) and of the samplers. Random numbers that the dataset draws in worker processes are the same after a
    resume with `draws`, else a warning says that they are not; nor is all of what a loader without a length draws.

    `lookahead`: how many batches the training loop fetches ahead, as for :class:`StatefulIterableLoader`. `world_size`
    and `rank` are of the ranks that read data of their own; `inner_sampler` is what the sampler takes its indices from.
    """

    _own = frozenset(
        {"lookahead", "_source", "_generators", "_draws", "_drawing", "_samples"}
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
        # A DataLoader refuses to have its samplers set; this copy is this object's own.
        inner.__dict__["batch_sampler" if batched else "sampler"] = source
        samples = inner.dataset
        drawing = DrawingDataset(samples, inner.collate_fn, seeded=draws is not None, workers=inner.num_workers > 0)
        if draws is not None or inner.num_workers > 0:
            inner.__dict__["dataset"] = drawing
        super().__init__(inner)
        self._draws, self._drawing, self._samples = draws, drawing, samples
        self._source = source
        self._generators = Generators(inner, samplers, samples)
        self.lookahead = int(shapes.length_of(inner) is None)
        self._world_size, self._rank = world_size, rank
        self._pending: dict[str, Any] | None = None
        self._run: _Run | None = None

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        return self._samples

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """The original's, not the stand-in that can skip."""
        return self._source.full if self._inner.batch_sampler is not None else None

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The original's; that of a stock batch sampler where one was given, of which the loader knows nothing."""
        if self._inner.batch_sampler is None:
            return self._source.full
        return self._inner.sampler if self._source.items is self._source.full else self._source.items

    @property
    def batches_done(self) -> int:
        """Batches of this loader that are behind it in the epoch; after loading, in units of this loader."""
        if self._pending is None:
            return 0 if self._run is None else self._run.start_batches + self._run.batches - self._ahead(self._run)
        return self._batches_behind(self._pending) if shapes.is_midway(self._pending) else 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, the position after the last batch given out; but for random numbers the same on all
        ranks. On loading, each rank should get its own rank's where it existed, else rank 0's.
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
            "drawn": self._drawing.drawn,
            "drawers": list(map(rng.generator_state, self.drawers)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; a finished epoch is followed by the next one. DataError: this loader can't finish it:
        another sampler, number of samples, or world size where no common order is known. Torchdata's is not taken.
        """
        if "kind" not in state:
            return
        state = {"attributes_now": {"lost": []}, "states_now": [], "drawers": [], **state}  # which format 1 lacks
        if shapes.is_midway(state):
            shapes.refuse_other_data(state, self._shape, self._world_size, self._order)
            set_epoch = getattr(self._epoch_sampler(), "set_epoch", None)
            if set_epoch is not None and state["epoch"] is not None:
                set_epoch(state["epoch"])
        self._generators.restore({name: state[f"{name}_now"] for name in ("generators", "attributes", "states")})
        drawers, saved = self.drawers, state["drawers"]
        done = [rng.set_generator_state(*pair) for pair in zip(drawers, saved, strict=False)]
        begun_anew = len(drawers) != len(saved) or not all(done)
        # Of an epoch that is drawn again what changed in it is lost too: it may be drawn more than once.
        begun = state.get("attributes", {}) if shapes.is_midway(state) else {}
        lost = list(dict.fromkeys([*begun.get("lost", []), *state["attributes_now"]["lost"]]))
        if self._rank == 0:
            for message in self._differences(state, lost, begun_anew):
                warnings.warn(message, stacklevel=2)
        self._pending, self._run = state, None

    @property
    def drawers(self) -> list[Any]:
        """The generators that samples and their collating draw from in this process, and that nothing seeds."""
        held = [self._inner.collate_fn, *[self._samples] * (self._draws is None)]
        return [] if self._inner.num_workers else generators_of(*held)

    def _ahead(self, run: _Run) -> int:
        """How many of the batches given out are not trained on."""
        return 0 if run.ended else min(self.lookahead, run.batches)

    def _differences(self, state: dict[str, Any], lost: list[str], begun_anew: bool) -> Iterator[str]:
        """What does not go on as if the run had not been interrupted."""
        if begun_anew:
            yield (
                "the random number generators that the dataset and collate_fn have in this process are not those in the"
                " checkpoint, and begin anew. Make as many in the constructors, for as many workers, to go on."
            )
        for name, where in (("seed", "seed_everything"), ("shuffle", "the DataLoader")):
            saved, own = state.get(name), self._order[name]
            if saved != own and None not in (saved, own):
                yield (
                    f"the order of the data is of {name} {saved} in the checkpoint, and of {own} here: an epoch that"
                    f" was begun is finished in the one, and those after it follow the other. Give {where} {saved} to"
                    " go on as if the run had not been interrupted."
                )
        goes_on = shapes.is_midway(state) or (self._inner.persistent_workers and self._inner.num_workers > 0)
        if state.get("drawn") and self._draws is None and goes_on:
            yield (
                "the dataset drew random numbers in the worker processes of its DataLoader, whose generators are not in"
                " the checkpoint: after resuming, its samples have others. Set sample_seeds: true on the strategy to"
                " seed them by epoch and sample."
            )
        if state.get("ahead") and shapes.is_midway(state):
            yield (
                "a sampler or a dataloader has no length, so that the loop fetches a batch ahead of the steps: random"
                " numbers that samples draw, or a sampler without a length from the global generators, are others after"
                " resuming. Give it a length to go on as if the run had not been interrupted."
            )
        if lost:
            yield (
                f"these attributes of samplers change between epochs and are not in the checkpoint: {', '.join(lost)}."
                " They begin anew, and the order of the data with them. Give the sampler state_dict() and"
                " load_state_dict() to go on where it was."
            )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        run, batches = self._begin()
        for batch in batches:
            run.batches += 1
            yield batch
        run.ended = True

    def _new_run(self, generators: dict[str, Any], draws: tuple[int, int, int] | None, *, seeded: bool) -> _Run:
        """``generators``: at the start. ``draws``: what random numbers of samples are seeded by: seed, epoch, iteration
        in the epoch. ``seeded``: whether the iterator draws a seed for its workers (persistent ones draw one once).
        """
        return _Run(self._shape, {"epoch": self._epoch, "seeded": seeded, "draws": draws, **generators})

    def _begin(self) -> tuple[_Run, Iterator[Any]]:
        loaded, self._pending = self._pending, None
        inner, generators = self._inner, self._generators
        epoch = self._epoch
        begun = loaded if loaded is not None and shapes.is_midway(loaded) else None
        other_epoch = begun is not None and None not in (begun["epoch"], epoch) and begun["epoch"] != epoch
        resumed = None if other_epoch else begun
        keeps_workers = inner.persistent_workers and inner.num_workers > 0
        creates = not keeps_workers or inner._iterator is None
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
        else:
            batches = iter(inner)
        if resumed:
            # The generators that are the loader's own go on from the epoch's start.
            rng.set_rng_state(now["rng"])
        self._run = run
        return run, batches

    def _next_draws(self, resumed: dict[str, Any] | None, loaded: dict[str, Any] | None) -> tuple[int, int, int] | None:
        """Seed what the samples of this iteration draw; ``loaded`` is of the iteration before it, or ``resumed``."""
        if self._draws is None:
            return None
        (seed, epoch), cycle = self._draws(), 0
        if resumed and resumed.get("draws"):
            seed, epoch, cycle = resumed["draws"]
        elif (before := loaded["draws"] if loaded else self._run and self._run.begun["draws"]) and before[1] == epoch:
            cycle = before[2] + 1
        self._drawing.begin(seed, epoch, cycle)
        return seed, epoch, cycle

    def _rest(self, state: dict[str, Any]) -> Epoch:
        """The epoch from the position of `state` on."""
        source, start = self._source, state["samples"]
        if state["kind"] != "distributed":
            return source.epoch(start)
        dealt: Any = source.items
        ranks = {"rank": dealt.rank, "world_size": dealt.num_replicas, "drop_last": dealt.drop_last}
        share = functools.partial(shapes.rank_share, start=start, **ranks)
        return source.epoch(items=shapes.of_all_ranks(dealt, state["seed"], state["shuffle"]), share=share)

    def _batches_behind(self, state: dict[str, Any]) -> int:
        # Counted from the end, so that the epoch ends with the loader's length.
        shape = self._shape
        total, left = shape.batches_left(0), shape.batches_left(state["samples"])
        return int(state["batches"]) if total is None or left is None else total - left

    @property
    def _shape(self) -> shapes.Shape:
        return shapes.shape_of(self._source.items, self._batches)

    @property
    def _batches(self) -> Any:
        """The batch sampler, which with a batch size of None may be in the sampler's place."""
        return self.batch_sampler if self._source.items is self._source.full else self._source.full

    @property
    def _epoch(self) -> int | None:
        """The epoch that the training loop has set."""
        sampler = self._epoch_sampler()
        return getattr(sampler, "epoch", None) if hasattr(sampler, "set_epoch") else None

    @property
    def _order(self) -> dict[str, Any]:
        return {name: getattr(self._epoch_sampler(), name, None) for name in ("seed", "shuffle")}

    def _epoch_sampler(self) -> Any:
        """What holds the epoch's number: the sampler, or the one under a batch sampler."""
        nested = getattr(self._batches, "sampler", None)
        return next((s for s in (nested, self.sampler) if hasattr(s, "set_epoch")), self.sampler)
