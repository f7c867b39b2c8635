"""What a checkpoint has, in the portable form's terms: live before a save, or stored in files of any form.

Tensors that are stored stay in their files until one is asked for. Converting and exporting take one after the other,
so that memory is bounded by the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.manifest import Facts
from lightning_shard.errors import CheckpointError

PORTABLE, FULL = "portable", "full"


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor in a file, which a save reads when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]  # A new contiguous tensor on the host; every call reads again.

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([0] * len(self.shape)), sizes=torch.Size(self.shape))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.read()


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is to be saved on one rank, or what was stored."""

    # Key to tensor, each tensor once: a `StoredTensor`, or this rank's plain tensor (full), DTensor or what stands for
    # one (see `lightning_shard.checkpoint.files.tensor_files`).
    tensors: Mapping[str, Any]
    trainer_state: Mapping[str, Any]  # What ``trainer.pt`` has. In a save rank 0's counts.
    facts: Facts  # In a save rank 0's count.
    aliases: Mapping[str, str] = field(default_factory=dict)  # Key of a tied name to the key of its tensor.
    # Key of each tensor of optimizer state to what it is.
    slots: Mapping[str, layout.SlotName] = field(default_factory=dict)
    own_state: Mapping[str, Any] | None = None  # In a save: what this rank alone goes on with.
    # Of what was stored: that of each rank that saved it, read when called; None: `trainer_state` has it, or nothing.
    own_states: Callable[[], list[dict[str, Any]]] | None = None
    form: str = PORTABLE  # ``"portable"``, ``"full"``, or what another library calls its own.

    @property
    def whole_state(self) -> Mapping[str, Any]:
        """`trainer_state` with what each rank keeps of itself, where other ranks, or other forms, are to have it."""
        if self.own_states is None:
            return self.trainer_state
        run = {**self.trainer_state[layout.RUN_STATE], "ranks": self.own_states()}
        return {**self.trainer_state, layout.RUN_STATE: run}

    @property
    def has_averages(self) -> bool:
        """Whether there are averages of weights, with an update in them."""
        updates = self.trainer_state.get(layout.AVERAGING_STATE, {}).get("n_averaged", 1)
        return any(key.startswith(layout.AVERAGE_PREFIX) for key in self.tensors) and bool(updates)

    def averaged(self) -> Contents:
        """The same with averages in the place of the weights that they are of.

        Raises CheckpointError where there are none, or no update is in them yet.
        """
        averages = layout.without_prefix(layout.AVERAGE_PREFIX, self.tensors)
        if not self.has_averages:
            raise CheckpointError(
                "the checkpoint has no averages of weights"
                + (" yet: no update is in them" if averages else "; callbacks such as EMAWeightAveraging take them")
            )
        tensors = {k: averages.get(k.removeprefix(layout.MODEL_PREFIX), t) for k, t in self.tensors.items()}
        return replace(self, tensors=tensors)

    @staticmethod
    def of(
        weights: Mapping[str, Any],
        aliases: Mapping[str, str],
        slots: Mapping[layout.SlotName, Any],
        further: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> Contents:
        """Of weights by FQN, tied FQNs to those, optimizer state, and ``further`` tensors by key; ``rest`` as here."""
        tensors = {layout.model_key(fqn): tensor for fqn, tensor in weights.items()}
        return Contents(
            tensors={**tensors, **{name.key: tensor for name, tensor in slots.items()}, **(further or {})},
            aliases={layout.model_key(alias): layout.model_key(fqn) for alias, fqn in aliases.items()},
            slots={name.key: name for name in slots},
            **rest,
        )
