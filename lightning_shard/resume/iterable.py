"""A DataLoader whose state is that of its IterableDataset, or its own."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_shard.resume.shape import length_of


class Delegating:
    """Has every attribute of `inner`, and sets those on it that `_own` does not name.

    What Python itself looks for by a name such as ``__copy__`` is the wrapper's.
    """

    _own: frozenset[str] = frozenset()

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)

    def __getattr__(self, name: str) -> Any:
        # Reached for what neither this object nor the class has. Before __init__ (copy, pickle) there is no inner.
        if name == "_inner" or name in self._own or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __len__(self) -> int:
        return len(self._inner)


class DelegatingLoader(Delegating, DataLoader[Any]):
    """Is a DataLoader for ``isinstance``; iterating is the subclass's.

    Frameworks read samplers, worker counts and dataset from a loader, set its ``worker_init_fn`` and shut its
    ``_iterator`` down: all of that reaches `inner`. DataLoader's own constructor is not called.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self._inner)


def has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class StatefulIterableLoader(DelegatingLoader):
    """Carries the ``state_dict`` of the dataset, or of `inner` itself, as it was after the last batch trained on.

    Making an iterator draws nothing from the global generators (torch draws a seed for workers, which there are
    none of), so that it may be made before or after a checkpoint's are set. A dataset that draws from them itself
    must keep what it drew in its state.

    A training loop that can't know the length fetches one batch ahead, to see the end coming. `lookahead` says how
    many: 1 for a loader without a length, else 0; set it to 0 for a loop that takes batches only as it uses them.
    """

    _own = frozenset({"lookahead", "_world_size", "_history", "_ended", "_spent", "_stateful", "_first"})

    def __init__(self, inner: DataLoader[Any], *, world_size: int, source: Any) -> None:
        super().__init__(inner)
        self._stateful = source
        # Hugging Face's begin every iteration at what was loaded, unless they were told of another epoch.
        hugging_face = type(source).__module__ == "datasets.iterable_dataset"
        self._first = copy.deepcopy(source.state_dict()) if hugging_face else None
        self.lookahead = int(length_of(inner) is None)
        self._world_size = world_size
        # (batches, dataset state) after the last batches given out, oldest first.
        self._history: list[tuple[int, Any]] = []
        self._ended = self._spent = False

    def state_dict(self) -> dict[str, Any]:
        """This rank's; a stream is each rank's own, so all ranks' must be in the checkpoint."""
        if not self._history:
            batches, dataset = 0, self._dataset_state()
        else:
            # Once the end was met, nothing is ahead of the training loop.
            back = 1 if self._ended else 1 + self.lookahead
            batches, dataset = self._history[-min(back, len(self._history))]
        return {
            "kind": "iterable",
            "dataset": dataset,
            "batches": batches,
            "samples": batches,
            "finished": self._ended,
            "world_size": self._world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the dataset its state; warns at another world size, where only the dataset knows what it means."""
        if "kind" not in state:  # the loader's own, of before
            state = {"world_size": self._world_size, "dataset": state, "batches": 0, "finished": False}
        if state["world_size"] != self._world_size:
            warnings.warn(
                f"the state of {type(self._stateful).__name__} was written by {state['world_size']} processes, each"
                f" with a stream of its own, and is resumed on {self._world_size}: what was seen is not known in"
                " common, samples may be repeated or missed",
                stacklevel=2,
            )
        begins = self._first is not None and state["finished"]
        self._stateful.load_state_dict(copy.deepcopy(self._first if begins else state["dataset"]))
        self._history = [(0 if state["finished"] else state["batches"], copy.deepcopy(state["dataset"]))]
        self._ended, self._spent = False, state.get("spent", False)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._spent:
            self._ended, self._spent = True, False
            return iter(())
        # A state that was loaded and not used yet is where this iteration starts.
        if len(self._history) != 1 or self._ended:
            if self._first is not None:
                self._stateful.load_state_dict(copy.deepcopy(self._first))
            self._history = [(0, self._first or self._dataset_state())]
        self._ended = False
        return self._batches(self._history)

    def _batches(self, history: list[tuple[int, Any]]) -> Iterator[Any]:
        before = torch.get_rng_state()
        batches = iter(self._inner)
        torch.set_rng_state(before)
        for batch in batches:
            history.append((history[-1][0] + 1, self._dataset_state()))
            del history[: -(1 + max(1, self.lookahead))]
            yield batch
        if history is self._history:
            # Its state may have been set back at its end.
            history.append((history[-1][0], self._dataset_state()))
            self._ended = True

    def _dataset_state(self) -> Any:
        before = torch.get_rng_state()  # of which torchdata's loader draws a seed when it is asked for its state
        # Datasets tend to give the very dictionary that they go on to change.
        state = copy.deepcopy(self._stateful.state_dict())
        torch.set_rng_state(before)
        return state
