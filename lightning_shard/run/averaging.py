"""Averages of a fit's weights that lie in shards beside what is stepped, for Lightning's callbacks that average:
elementwise, by torch's and Lightning's arithmetic over this rank's boxes.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard

from lightning_shard._lightning import Replacements, callbacks
from lightning_shard.checkpoint.files.layout import AVERAGING_STATE
from lightning_shard.checkpoint.files.tensor_files import chunks_of
from lightning_shard.checkpoint.optimizer_state import live_tensors
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.engines.resident import Resident
from lightning_shard.tensors.flat import BoxTensor, LiveTensor
from lightning_shard.tensors.names import Names, fqns


class Shards(nn.Module):
    """This rank's boxes of a module's parameters and buffers, as code that averages modules reads them."""

    def __init__(self, parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(parameters):
            self.register_parameter(f"parameter_{number}", nn.Parameter(tensor.detach(), requires_grad=False))
        for number, tensor in enumerate(buffers):
            self.register_buffer(f"buffer_{number}", tensor.detach())

    def __deepcopy__(self, memo: Any) -> "Shards":
        # Not all of the memory that a box lies in.
        return Shards((p.clone() for p in self.parameters()), (b.clone() for b in self.buffers()))

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Nothing: a checkpoint has the shards by FQN."""
        return {} if destination is None else destination

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing, likewise."""


class Averaging:
    """The average of one fit. All ranks call each method, in the same order."""

    def __init__(self, module: nn.Module, engine: Engine, *, device: torch.device) -> None:
        self._module, self._engine, self._device = module, engine, device
        names, live = self._live()
        parameters = {id(p) for p in module.parameters()}
        self._parameters = [name for name, tensor in names.tensors.items() if id(tensor) in parameters]
        self._persistent = [name for name in names.tensors if name not in set(self._parameters)]
        self._others = [name for name in live if name not in names.tensors]
        # They stay what they are, and take long to find.
        self._places = {name: (tensor.shape, tensor.dtype, chunks_of(tensor)) for name, tensor in live.items()}
        self._swap: Callable[[nn.Module], None] | None = None  # while the average is in the module

    def begin(self, replacements: Replacements, trainer: Trainer) -> None:
        """Let the Trainer's callback average, from the values of now on."""
        self._average = callbacks.average_shards(replacements, trainer, self.current, self.write)
        self.place = callbacks.averages_place(callbacks.callbacks(trainer))

    def _live(self) -> tuple[Names, dict[str, LiveTensor]]:
        self._engine.before_reading()
        names = fqns(self._module)
        others = {name: buffer for name, buffer in self._module.named_buffers() if names.of(buffer) is None}
        return names, {**live_tensors(names, self._engine.tensors.masters()), **others}

    def current(self) -> Shards:
        """This rank's boxes of the module's parameters, masters in their place, and buffers; live."""
        _, live = self._live()

        def boxes(names: Iterable[str]) -> Iterator[Tensor]:
            for name in names:
                for chunk in self._places[name][2]:
                    yield find_tensor_shard(live[name], MetadataIndex("", chunk.offsets))  # type: ignore[arg-type]

        return Shards(boxes(self._parameters), boxes([*self._persistent, *self._others]))

    def write(self, change: Callable[[nn.Module], None], *, swaps: bool = False) -> None:
        """Have ``change`` write into `current`, and the next forward see it; ``swaps``: a second time undoes it."""
        if self._swap is None:
            self._share_buffers()
        change(self.current())
        self._engine.publish()
        if swaps:
            self._swap = change if self._swap is None else None

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give every rank the averages of rank 0's buffers, as `Checkpoints.synchronize_buffers` does buffers."""
        for buffer, _ in zip(self._average.shards.buffers(), self._persistent, strict=False):
            moved = buffer.to(self._device)
            broadcast_from_rank_0([moved])
            buffer.copy_(moved)

    @contextmanager
    def out_of_module(self) -> Generator[None, None, None]:
        """In it the module has its own values."""
        swaps = [] if self._swap is None else [self._swap]
        for swap in swaps:
            self.write(swap, swaps=True)
        yield
        for swap in swaps:
            self.write(swap, swaps=True)

    def resident(self, beside: str) -> Iterator[Resident]:
        """The average; ``beside``: the memory of what is averaged."""
        for tensor in chain(self._average.shards.parameters(), self._average.shards.buffers()):
            yield Resident("averages", "host" if self.place == "host" else beside, tensor)

    # Checkpoints

    def tensors(self) -> dict[str, BoxTensor]:
        """FQN to the average, of parameters, and of persistent buffers where they are averaged; in place."""
        average, found = self._average.shards, {}
        values = chain(average.parameters(), average.buffers())
        for name in (*self._parameters, *(self._persistent if self._average.has_buffers else ())):
            shape, dtype, chunks = self._places[name]
            found[name] = BoxTensor(shape, dtype, {tuple(chunk.offsets): next(values).detach() for chunk in chunks})
        return found

    def saved(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """What Lightning dumped, with the module's own state dict and the number of updates."""
        self._share_buffers()
        state_dict = checkpoint.get("current_model_state", checkpoint["state_dict"])  # the callback put it there
        state = {AVERAGING_STATE: {"n_averaged": torch.tensor(self._average.count())}}
        kept = {name: value for name, value in checkpoint.items() if name != "current_model_state"}
        return {**kept, "state_dict": state_dict, **state}

    @torch.no_grad()
    def loaded(self, state: Mapping[str, Any], *, averages: bool) -> None:
        """After a checkpoint was loaded: go on from its ``averages``, or begin anew from its weights."""
        if averages:
            self._average.set_count(int(state.get(AVERAGING_STATE, {}).get("n_averaged", 0)))
            return
        rank_zero_warn("The checkpoint has no averages of weights: they begin with its weights.")
        average, current = (chain(s.parameters(), s.buffers()) for s in (self._average.shards, self.current()))
        for ours, live in zip(average, current, strict=True):
            ours.copy_(live)
        self._average.set_count(0)
