"""Step full parameters at owner ranks, for optimizers that can't step shards.

Each parameter has one owner among the ranks that shard it, balanced by elements. A step sends the shards of values and
gradients to the owners. There the user's own optimizer steps, with its state, and the new values are sent back. The
shards stay the master weights. The owner has full values only during a step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.engines.engine import Run
from lightning_shard.engines.optimizer_probe import Needs, probe
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import SHARD
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import OwnedOptimizer, OwnedParameter, Slot, local, plain_slots

BUCKET = 2**25
"""Elements of full parameters that are sent together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """This rank's shard of a parameter, maybe empty. The ranks' shards are consecutive in row-major order."""

    fqn: str
    shape: torch.Size  # The full parameter's.
    value: Callable[[], Tensor]  # The 1-D shard of the master weights, which a step writes.
    gradient: Callable[[], Tensor | None]  # The 1-D shard of the reduced gradient. None: no rank has a gradient.
    group: dict[str, Any]  # The optimizer's parameter group.
    tensor: Tensor  # The group's tensor for it, maybe a flat one with several parameters.


def needs_of(optimizer: Optimizer, run: Run) -> Needs:
    """The optimizer's needs in ``run``, see `probe`."""
    alone, aligned = run.mesh[SHARD].size() == 1, run.planned.aligned
    return probe(optimizer, dtype=run.policy.master, aligned=aligned, alone=alone, device=run.device)


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter: in order of size, each goes to the rank with the fewest elements."""
    loads, found = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[index] = rank = loads.index(min(loads))
        loads[rank] += sizes[index]
    return found


_parameters: WeakKeyDictionary[Optimizer, dict[str, nn.Parameter]] = WeakKeyDictionary()
"""By optimizer, the parameters that its state is keyed by, for a later run with the same optimizer."""


class OwnerSteps:
    """Steps one optimizer on full parameters. All ranks of ``group`` construct it and call its methods in order."""

    def __init__(
        self,
        optimizer: Optimizer,
        shards: Sequence[Shard],
        *,
        replicated: Sequence[tuple[str, Tensor, dict[str, Any]]] = (),
        step: Callable[..., Any],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Choose owners and send each the lengths of its shards. ``optimizer`` is the user's, with the groups of
        ``shards``, in one order on all ranks. ``step`` is its own step. ``replicated`` is stepped on every rank.
        """
        if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
            raise ConfigurationError(
                f"{type(optimizer).__qualname__} writes values for training and for evaluation outside of its step, "
                "but then each rank has only shards. It is stepped on full parameters here, or is one of several "
                "optimizers of ZeRO. Use shard_ddp, or shard_fsdp with an elementwise optimizer."
            )
        self.optimizer = optimizer
        with suppress(AttributeError):  # a wrapping optimizer may not call Optimizer.__init__
            optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        self._step = step
        self._shards = shards
        self._replicated = replicated
        self._group = group
        self._device = device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._owners = owners([shard.shape.numel() for shard in shards], self._size)
        # By index of the parameters that this rank owns: the length of each rank's shard, in the order of ranks, and
        # the full parameter that the optimizer's state is keyed by, empty between steps.
        self._lengths: dict[int, list[int]] = {}
        self._owned: dict[int, nn.Parameter] = {}
        self._choose_owners()
        self._move_state_to_owners()
        self._slots: Mapping[str, Mapping[str, Slot]] = {}
        self._values: Mapping[str, Mapping[str, Any]] = {}

    def _choose_owners(self) -> None:
        by_owner = self._by_owner(range(len(self._shards)))
        lengths = [self._shards[index].value().numel() for rank in by_owner for index in rank]
        mine = by_owner[self._rank]
        found = torch.empty(self._size, len(mine), dtype=torch.int64, device=self._device)
        sent = torch.tensor(lengths, dtype=torch.int64, device=self._device)
        dist.all_to_all_single(found.view(-1), sent, [len(mine)] * self._size, list(map(len, by_owner)), self._group)
        known = _parameters.setdefault(self.optimizer, {})
        for index, of_ranks in zip(mine, found.t().tolist(), strict=True):
            like, fqn = self._shards[index].value(), self._shards[index].fqn
            if fqn not in known or (known[fqn].dtype, known[fqn].device) != (like.dtype, like.device):
                known[fqn] = nn.Parameter(torch.empty(0, dtype=like.dtype, device=like.device))
            self._lengths[index], self._owned[index] = of_ranks, known[fqn]

    def _move_state_to_owners(self) -> None:
        """Move state that the optimizer's constructor has made to the owned parameters, if there is one rank.
        ConfigurationError: it has made state of shards.
        """
        state = self.optimizer.state
        made = {index: state[shard.tensor] for index, shard in enumerate(self._shards) if state.get(shard.tensor)}
        if made and self._size > 1:
            raise ConfigurationError(
                f"{type(self.optimizer).__qualname__} makes its state in its constructor, but is stepped on full "
                "parameters, or with other optimizers, whose owners are chosen later. Use shard_ddp, or an optimizer "
                "that makes its state when it steps."
            )
        for index, slots in made.items():
            del state[self._shards[index].tensor]
            state[self._owned[index]] = {name: local(slot) for name, slot in slots.items()}

    def _by_owner(self, indices: Iterable[int]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self._size)]
        for index in indices:
            found[self._owners[index]].append(index)
        return found

    @torch.no_grad()
    def step_parameters(self, **kwargs: Any) -> None:
        """Step all parameters. ``kwargs`` are arguments of the optimizer's own step."""
        values = [shard.value() for shard in self._shards]
        gradients = {i: g for i, shard in enumerate(self._shards) if (g := shard.gradient()) is not None}
        buckets = list(self._buckets(values, gradients))
        for index, value in self._received(buckets, values):
            self._owned[index].data = value
        for index, gradient in self._received(buckets, gradients):
            self._owned[index].grad = gradient
        with self._owned_in_groups(), torch.enable_grad():
            self._step(**kwargs)
        for bucket, shards in _overlapped((b, self._from_owners(b, values)) for b in buckets):
            indices = [index for owned_there in self._by_owner(bucket) for index in owned_there]
            for index, shard in zip(indices, shards.split([values[i].numel() for i in indices]), strict=True):
                values[index].copy_(shard)
        for owned in self._owned.values():
            owned.grad, owned.data = None, owned.data.new_empty(0)

    def _buckets(self, values: Sequence[Tensor], gradients: Mapping[int, Tensor]) -> Iterator[list[int]]:
        """Indices of parameters with gradients of equal dtypes, about `BUCKET` elements at a time."""
        kinds: dict[Any, list[int]] = {}
        for index, gradient in gradients.items():
            kinds.setdefault((values[index].dtype, gradient.dtype), []).append(index)
        for indices in kinds.values():
            bucket: list[int] = []
            elements = 0
            for index in indices:
                bucket.append(index)
                elements += self._shards[index].shape.numel()
                if elements >= BUCKET or index == indices[-1]:
                    yield bucket
                    bucket, elements = [], 0

    def _received(
        self, buckets: Iterable[list[int]], sent: Mapping[int, Tensor] | Sequence[Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Send shards to the owners, and yield index and full tensor of each owned one, bucket by bucket."""
        for bucket, shards in _overlapped((b, self._to_owners(b, sent)) for b in buckets):
            mine = self._by_owner(bucket)[self._rank]
            rows = [self._lengths[index] for index in mine]
            pieces = shards.split([lengths[rank] for rank in range(self._size) for lengths in rows])
            for place, index in enumerate(mine):
                yield index, torch.cat(pieces[place :: len(mine)]).view(self._shards[index].shape)

    def _to_owners(self, bucket: Sequence[int], sent: Mapping[int, Tensor] | Sequence[Tensor]) -> Callable[[], Tensor]:
        """Send shards to the owners. The result waits for this rank's, concatenated by sending rank."""
        by_owner = self._by_owner(bucket)
        parts = [[sent[index] for index in owned_there] for owned_there in by_owner]
        mine = [self._lengths[index] for index in by_owner[self._rank]]
        sizes = [sum(lengths[rank] for lengths in mine) for rank in range(self._size)]
        return self._all_to_all(parts, sizes, like=sent[bucket[0]])

    def _from_owners(self, bucket: Sequence[int], values: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Send each rank its shards of owned parameters. The result waits for this rank's, concatenated by owner."""
        by_owner = self._by_owner(bucket)
        full = [self._owned[i].data.reshape(-1).split(self._lengths[i]) for i in by_owner[self._rank]]
        parts = [[shards[rank] for shards in full] for rank in range(self._size)]
        sizes = [sum(values[i].numel() for i in owned_there) for owned_there in by_owner]
        return self._all_to_all(parts, sizes, like=values[bucket[0]])

    def _all_to_all(self, parts: Sequence[list[Tensor]], sizes: list[int], *, like: Tensor) -> Callable[[], Tensor]:
        """Send the tensors ``parts[rank]`` to each rank, and receive ``sizes[rank]`` elements. The result waits."""
        sent = torch.cat([like.new_empty(0), *(t.reshape(-1) for part in parts for t in part)]).to(self._device)
        received = sent.new_empty(sum(sizes))
        lengths = [sum(t.numel() for t in part) for part in parts]
        work = dist.all_to_all_single(received, sent, sizes, lengths, self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return received.to(like.device)

        return wait

    @contextmanager
    def _owned_in_groups(self) -> Iterator[None]:
        """Replace the shards in the optimizer's groups by the owned parameters in this context."""
        before = [(group, group["params"]) for group in self.optimizer.param_groups]
        sharded = {id(shard.tensor) for shard in self._shards}
        for group, given in before:
            mine = [owned for index, owned in self._owned.items() if self._shards[index].group is group]
            group["params"] = [*mine, *(p for p in given if id(p) not in sharded)]
        try:
            yield
        finally:
            for group, given in before:
                group["params"] = given

    def stepped_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """FQN, and the full parameter at its owner or the shard on other ranks."""
        for index, shard in enumerate(self._shards):
            yield shard.fqn, self._owned[index] if index in self._owned else shard.value()
        yield from ((fqn, parameter) for fqn, parameter, _ in self._replicated)

    def share_state(self) -> None:
        """Tell every rank which state exists, for a save. All ranks of the run call it."""
        own_slots: dict[str, dict[str, Slot]] = {}
        own_values: dict[str, dict[str, Any]] = {}
        here = [(self._shards[index].fqn, owned) for index, owned in self._owned.items()]
        for fqn, parameter in [*here, *((fqn, tensor) for fqn, tensor, _ in self._replicated)]:
            for name, value in plain_slots(self.optimizer.state.get(parameter, {})).items():
                if isinstance(value, Tensor):
                    own_slots.setdefault(fqn, {})[name] = Slot(shape=tuple(value.shape), dtype=value.dtype)
                else:
                    own_values.setdefault(fqn, {})[name] = value
        gathered = Ranks.of().gather((own_slots, own_values))
        self._slots = {fqn: slots for found, _ in gathered for fqn, slots in found.items()}
        self._values = {fqn: values for _, found in gathered for fqn, values in found.items()}

    def as_owned_optimizer(self) -> OwnedOptimizer:
        """The optimizer as checkpoints see it, with the state found by the last `share_state`."""
        parameters = [
            OwnedParameter(fqn=shard.fqn, shape=tuple(shard.shape), group=shard.group, tensor=self._owned.get(index))
            for index, shard in enumerate(self._shards)
        ]
        parameters += [
            OwnedParameter(fqn=fqn, shape=tuple(tensor.shape), group=group, tensor=tensor)
            for fqn, tensor, group in self._replicated
        ]
        return OwnedOptimizer(optimizer=self.optimizer, parameters=parameters, slots=self._slots, values=self._values)


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise ConfigurationError(
        f"{type(optimizer).__name__} is stepped on full parameters, whose state is on the ranks that own them, so "
        "its state_dict() would lack most parameters. Use full_tensor(trainer, name, slot), or "
        "trainer.save_checkpoint."
    )


def _overlapped(jobs: Iterable[tuple[list[int], Callable[[], Tensor]]]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield each bucket with its received tensor, while the next two are in transfer."""
    started: deque[tuple[list[int], Callable[[], Tensor]]] = deque()
    for job in jobs:
        started.append(job)
        if len(started) > 2:
            bucket, wait = started.popleft()
            yield bucket, wait()
    for bucket, wait in started:
        yield bucket, wait()
