"""Average of a fit's weights: elementwise over this rank's boxes, sharded as the masters."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.optim.swa_utils import get_ema_avg_fn, get_swa_avg_fn

from lightning_shard.callbacks.ema import EMACallback, memory_of_averages
from lightning_shard.checkpoint.files.layout import AVERAGING_STATE
from lightning_shard.checkpoint.files.tensor_files import chunks_of
from lightning_shard.checkpoint.optimizer_state import live_tensors
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.memory_breakdown import Resident
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.tensors.flat import BoxTensor, LiveTensor
from lightning_shard.tensors.names import Names, fqns


class Averaging:
    """Average of one callback in one fit. All ranks call each method, in the same order."""

    def __init__(self, module: nn.Module, engine: Engine, callback: EMACallback, *, device: torch.device) -> None:
        """Begin with the present values. ``device``: of the run, for sharing buffers."""
        self._module, self._engine, self._device = module, engine, device
        self._mean = get_swa_avg_fn() if callback.decay == "equal" else get_ema_avg_fn(float(callback.decay))
        self.place = memory_of_averages(callback)
        names, live = self._live()
        parameters = {id(p) for p in module.parameters()}
        self._parameters = [name for name, tensor in names.tensors.items() if id(tensor) in parameters]
        buffers = callback.use_buffers
        self._persistent = [name for name in names.tensors if name not in set(self._parameters) and buffers]
        self._others = [name for name in live if name not in names.tensors and buffers]
        # Shapes and boxes do not change, and are slow to find.
        self._places = {name: (tensor.shape, tensor.dtype, chunks_of(tensor)) for name, tensor in live.items()}
        on_host = self.place == "host"
        boxes = ((name, box.detach()) for name, box in self._current())
        self._average = [(name, box.to("cpu", copy=True) if on_host else box.clone()) for name, box in boxes]
        self._updates = 0
        self._is_swapped = False  # The module has the average, and its own values are kept instead.

    def _live(self) -> tuple[Names, dict[str, LiveTensor]]:
        self._engine.reshard_and_sync_masters()
        names = fqns(self._module)
        others = {name: buffer for name, buffer in self._module.named_buffers() if names.of(buffer) is None}
        return names, {**live_tensors(names, self._engine.masters()), **others}

    def _current(self) -> Iterator[tuple[str, Tensor]]:
        """Name and live box, for this rank's boxes of the averaged tensors. Masters replace their parameters."""
        _, live = self._live()
        for name in (*self._parameters, *self._persistent, *self._others):
            for chunk in self._places[name][2]:
                yield name, find_tensor_shard(live[name], MetadataIndex("", chunk.offsets))  # type: ignore[arg-type]

    # For the callback

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the present weights, by torch's arithmetic. The first update copies them."""
        for (_, average), (_, current) in zip(self._average, self._current(), strict=True):
            value = current.detach().to(average.device)
            average.copy_(self._mean(average, value, self._updates) if self._updates else value)
        self._updates += 1

    @torch.no_grad()
    def swap_into_module(self, average: bool) -> None:
        """Swap the average into the module, or its own weights back. Before the first update it does nothing."""
        if average == self._is_swapped or not self._updates:
            return
        if average:
            self._share_buffers()
        for (_, kept), (_, current) in zip(self._average, self._current(), strict=True):
            before = current.detach().clone()
            current.detach().copy_(kept)
            kept.copy_(before)
        self._engine.refresh_model_weights()
        self._is_swapped = average

    @torch.no_grad()
    def copy_into_module(self) -> None:
        """Copy the average into the module for good. Before the first update it does nothing."""
        if not self._updates:
            return
        self._share_buffers()
        for (_, kept), (_, current) in zip(self._average, self._current(), strict=True):
            current.detach().copy_(kept)
        self._engine.refresh_model_weights()

    def _share_buffers(self) -> None:
        """Give every rank rank 0's averages of buffers, as `Checkpoints.synchronize_buffers` does for buffers."""
        persistent = set(self._persistent)
        for buffer in [average for name, average in self._average if name in persistent]:
            moved = buffer.to(self._device)
            broadcast_from_rank_0([moved])
            buffer.copy_(moved)

    # For checkpoints and the memory account

    @contextmanager
    def out_of_module(self) -> Generator[None, None, None]:
        """Inside, the module has its own values."""
        swapped = self._is_swapped
        self.swap_into_module(False)
        yield
        self.swap_into_module(swapped)

    def resident(self, memory: str) -> Iterator[Resident]:
        """Live boxes of the average. ``memory``: of the averaged tensors, used unless the average is on the host."""
        for _, tensor in self._average:
            yield Resident("averages", "host" if self.place == "host" else memory, tensor)

    def tensors(self) -> dict[str, BoxTensor]:
        """FQN to the live average, of parameters, and of persistent buffers if they are averaged."""
        boxes, found = iter(self._average), {}  # in the order of names, then of chunks
        for name in (*self._parameters, *self._persistent):
            shape, dtype, chunks = self._places[name]
            found[name] = BoxTensor(shape, dtype, {tuple(chunk.offsets): next(boxes)[1] for chunk in chunks})
        return found

    def add_count(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Add the number of updates to ``checkpoint``, under Lightning's own key."""
        self._share_buffers()
        return {**checkpoint, AVERAGING_STATE: {"n_averaged": torch.tensor(self._updates)}}

    @torch.no_grad()
    def continue_from(self, state: Mapping[str, Any], *, averages: bool) -> None:
        """After a checkpoint was loaded: continue its ``averages``, or begin with its weights."""
        if averages:
            self._updates = int(state.get(AVERAGING_STATE, {}).get("n_averaged", 0))
            return
        rank_zero_warn("The checkpoint has no averages of weights: they begin with its weights.")
        self._updates = 0
        for (_, average), (_, current) in zip(self._average, self._current(), strict=True):
            average.copy_(current)
