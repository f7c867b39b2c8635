"""Count the bytes of live tensors on a rank, now or as the maximum over one step, and print tables of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_shard.engines.activation_offload import SAVED_OBSERVERS
from lightning_shard.engines.memory_breakdown import Resident, is_sharded, memory_of, unsharded
from lightning_shard.engines.memory_model import STATES, EngineFacts
from lightning_shard.errors import chain
from lightning_shard.memory import KINDS, PLACES, KindBytes, MemoryAccount, most
from lightning_shard.meters.throughput_windows import size_text
from lightning_shard.tensors.tracing import tree_leaves
from lightning_shard.text import columns

Storage = tuple[torch.device, int]


def account(held: Iterable[Resident], *, known: set[Storage] | None = None) -> MemoryAccount:
    """Sum the bytes of ``held``. Each storage counts once, in full, for the kind that comes first. Storages in
    ``known`` do not count, and new ones are added to it.
    """
    known = set() if known is None else known
    places: dict[str, dict[str, int]] = {place: dict.fromkeys(KINDS, 0) for place in PLACES}
    for kind, place, tensor in held:
        if isinstance(tensor, int):
            places[place][kind] += tensor
            continue
        for untyped in _untyped(tensor):
            storage = untyped.device, untyped.data_ptr()
            # A storage on the meta device has address 0. An empty one may have another's address.
            if storage[1] and (size := untyped.nbytes()) and storage not in known:
                known.add(storage)
                places[place][kind] += size
    return MemoryAccount(**{place: KindBytes(**kinds) for place, kinds in places.items()})


def _untyped(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor, or of the tensors inside a DTensor or another wrapper."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            # A DTensor names its mesh too.
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from _untyped(inner)
        return
    with suppress(NotImplementedError):  # Sparse tensors have no storage.
        yield tensor.untyped_storage()


@dataclass(frozen=True, eq=False)
class _Saved:
    """A tensor that forward saves for backward. Autograd keeps this object alive while it needs the tensor."""

    tensor: Tensor
    kind: str


Held = Callable[[], Iterable[Resident]]


class StepMeter:
    """Measures the maximum of each kind of bytes that this rank holds in one optimizer step.

    Call `watch_forward` before a forward pass, `count_saved` between forward and backward, and `count_resident` before
    and after the optimizer's step. Activations are the tensors that autograd has saved when backward begins. With
    checkpointing these are the inputs of recomputed modules, on the host if they are offloaded. Full parameters that
    autograd saves count as gathered. Kinds may peak at different times, so their sum is an upper bound.
    """

    def __init__(self, module: nn.Module, held: Held, gathered: Held | None = None, *, device: torch.device) -> None:
        """Set up a meter of ``module``, which computes on ``device``.

        ``held`` gives all tensors that the rank holds but activations. ``gathered`` gives the parameters that are full
        at this moment, for engines that free them before forward ends (default: FSDP2's).
        """
        self.account = MemoryAccount()
        self._module, self._held, self._device = module, held, device
        self._gathered = gathered or partial(unsharded, module)
        self._saved: WeakSet[_Saved] = WeakSet()
        self._kept: list[_Saved] = []  # Tensors that checkpointing keeps and autograd's hooks do not see.
        # Storages, not their addresses: activations reuse those once an engine has freed a gathered parameter.
        self._full: WeakSet[torch.UntypedStorage] = WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._saving: saved_tensors_hooks | None = None

    def watch_forward(self) -> None:
        self.count_resident()
        # Engines gather before the forward of FSDP2's units and of modules outside of them with sharded parameters.
        # Other modules get no hook: torch.compile would compile it, and recompile without it.
        units = [part for part in self._module.modules() if isinstance(part, FSDPModule) and part is not self._module]
        inside = {part for unit in units for part in unit.modules()}
        outside = [part for part in self._module.modules() if part not in inside]
        for part in units + [part for part in outside if any(map(is_sharded, part.parameters(recurse=False)))]:
            # The engine's own hook was registered earlier, so it has gathered when this one runs.
            self._hooks.append(part.register_forward_pre_hook(lambda *_: self._note_gathered()))
        SAVED_OBSERVERS.append(self._keep)
        self._saving = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._saving.__enter__()

    def _pack(self, tensor: Tensor) -> _Saved:
        full = any(storage in self._full for storage in _untyped(tensor))
        saved = _Saved(tensor, "gathered" if full else "activations")
        self._saved.add(saved)
        return saved

    def _keep(self, result: Any) -> None:
        self._kept += [_Saved(tensor, "activations") for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]

    def _note_gathered(self) -> None:
        if torch.compiler.is_compiling():
            # Inside a module that the user compiles.
            return
        full = list(self._gathered())
        self.account = most(self.account, account(full))
        for each in full:
            if isinstance(each.tensor, Tensor):
                self._full.update(_untyped(each.tensor))

    def count_saved(self) -> MemoryAccount:
        """Count resident and saved tensors, at the end of forward or when the step fails. Return the account so far."""
        saved = [*self._saved, *self._kept]
        self.stop_watching()
        self._full.clear()
        return self._count(saved)

    def count_resident(self) -> MemoryAccount:
        """Count resident tensors, such as gradients or optimizer state. Return the account so far."""
        return self._count(())

    def _count(self, saved: Iterable[_Saved]) -> MemoryAccount:
        known: set[Storage] = set()
        kept = account(self._held(), known=known)
        activations = (Resident(each.kind, memory_of(each.tensor, self._device), each.tensor) for each in saved)
        kept += account(activations, known=known)
        self.account = most(self.account, kept)
        return self.account

    def stop_watching(self) -> None:
        """Remove all hooks."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._keep in SAVED_OBSERVERS:
            SAVED_OBSERVERS.remove(self._keep)
        self._kept = []
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.__exit__(None, None, None)


def fullest_rank(accounts: Sequence[MemoryAccount]) -> int:
    """The rank with the most bytes on its device. Ties are decided by the bytes in all places."""
    totals = [[getattr(account, place).total for place in PLACES] for account in accounts]
    return max(range(len(totals)), key=lambda rank: (totals[rank][0], sum(totals[rank])))


def memory_table(
    account: MemoryAccount, *, title: str, notes: Sequence[str] = (), predicted: MemoryAccount | None = None
) -> str:
    """One rank's account as text: a line for each kind, a column for each place, or two with ``predicted``."""
    accounts = {"": account} if predicted is None else {"": account, ", predicted": predicted}
    places = [place for place in PLACES if place == "device" or any(getattr(a, place).total for a in accounts.values())]
    cells = {f"{place}{whose}": getattr(a, place) for place in places for whose, a in accounts.items()}
    sizes = {kind: [getattr(found, kind) for found in cells.values()] for kind in KINDS}
    rows = [("", *cells)]
    rows += [(k, *(size_text(size) if size else "-" for size in each)) for k, each in sizes.items() if any(each)]
    totals = {name: size_text(found.total) for name, found in cells.items()}
    if predicted is not None:
        if account.device.activations and not predicted.device.activations:
            totals["device, predicted"] = "-"
        differ = [kind for kind in _REASONS if getattr(account.device, kind) != getattr(predicted.device, kind)]
        notes = [*notes, *(f"{kind}: {_REASONS[kind]}" for kind in differ)]
    return "\n".join([title, columns([*rows, ("total", *totals.values())], numbers=True), *notes])


_REASONS = {
    "activations": "measured, not predicted here, so no total is predicted (`lightning-shard plan` predicts them)",
    "communication": "predicted at the peak of backward, counted at the end of it",
    "gradients": "predicted while a unit's full ones are not reduced yet, counted when all are",
}
"""Why measured bytes of a kind differ from predicted ones."""


def suggestions(
    account: MemoryAccount, engine: EngineFacts, *, aligned: bool = False, checkpointing: bool = False
) -> dict[str, int | None]:
    """Settings that need less of a rank's device, with the bytes that each saves (None: unknown), largest first.

    ``aligned``: suggest the ``_aligned`` presets. ``checkpointing``: activations are checkpointed already.
    """
    activations, now = account.device.activations, sum(getattr(account.device, kind) for kind in STATES)
    found: dict[str, int | None] = {}
    for name, (sharded, offloaded) in engine.advised.items():
        after = 0.0
        for kind in STATES - offloaded:
            resident = getattr(account.device, kind) + getattr(account.host, kind)
            full = resident * (engine.shards if kind in engine.sharded else 1)
            after += full / (engine.ranks if kind in sharded else 1)
        # Padding differs between engines, so less than a hundredth is no saving.
        if after < 0.99 * now:
            found[f"strategy: {name}{'_aligned' if aligned else ''}"] = round(now - after)
    found["half the batch size, with accumulate_grad_batches doubled"] = activations // 2 or None
    if not checkpointing:
        found["activation_checkpointing: units (at most, less what one unit keeps)"] = activations or None
    return dict(sorted(found.items(), key=lambda each: -1 if each[1] is None else each[1], reverse=True))


def advice(account: MemoryAccount, engine: EngineFacts, *, aligned: bool = False, checkpointing: bool = False) -> str:
    found = suggestions(account, engine, aligned=aligned, checkpointing=checkpointing)
    lines = [f"  {text}{'' if saves is None else f': {size_text(saves)} less'}" for text, saves in found.items()]
    return "\n".join(["These settings hold less on each rank's device, by this account:", *lines])


# Sources: c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDACachingAllocator.cpp, the CUDA runtime, cuBLAS.
_WORDS = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    *("cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` or an error in its chain of causes says that memory ran out."""
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (isinstance(one, RuntimeError) and any(words in str(one) for words in _WORDS))
        for one in chain(error)
    )


def append_to_message(error: BaseException, text: str) -> None:
    """Append a line to ``str(error)``. The error's type and its other arguments stay."""
    error.args = (f"{error.args[0] if error.args else type(error).__name__}\n{text}", *error.args[1:])
