"""Bytes counted on live tensors: what a rank holds now, and the most of each kind in one step; and tables of them."""

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

from lightning_shard.engines.memory_breakdown import Resident, is_sharded, unsharded
from lightning_shard.engines.memory_model import STATES, EngineFacts
from lightning_shard.engines.transforms import SAVED_OBSERVERS
from lightning_shard.errors import chain
from lightning_shard.memory import KINDS, PLACES, KindBytes, MemoryAccount, most
from lightning_shard.meters.throughput_windows import size_text
from lightning_shard.tensors.tracing import tree_leaves
from lightning_shard.text import columns

Storage = tuple[torch.device, int]


def account(held: Iterable[Resident], *, known: set[Storage] | None = None) -> MemoryAccount:
    """The bytes of ``held``: of each storage once and whole, for the kind that is given first. Those that are ``known``
    count for nothing, and new ones are added to these.
    """
    known = set() if known is None else known
    places: dict[str, dict[str, int]] = {place: dict.fromkeys(KINDS, 0) for place in PLACES}
    for kind, place, tensor in held:
        if isinstance(tensor, int):
            places[place][kind] += tensor
            continue
        for storage, size in storages(tensor):
            if storage not in known:
                known.add(storage)
                places[place][kind] += size
    return MemoryAccount(**{place: KindBytes(**kinds) for place, kinds in places.items()})


def storages(tensor: Tensor) -> Iterator[tuple[Storage, int]]:
    """The memory behind a tensor, with its bytes: a DTensor's and other wrappers' is that of the tensors inside."""
    for storage in _untyped(tensor):
        # On the meta device there is no address.
        if (size := storage.nbytes()) and (address := storage.data_ptr()):
            yield (storage.device, address), size


def _untyped(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            # A DTensor names its mesh too.
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from _untyped(inner)
        return
    with suppress(NotImplementedError):  # A tensor without storage: sparse.
        yield tensor.untyped_storage()


@dataclass(frozen=True, eq=False)
class _Saved:
    """A tensor that forward keeps for backward, for as long as autograd keeps it."""

    tensor: Tensor
    kind: str


Held = Callable[[], Iterable[Resident]]


class StepMeter:
    """Measures one optimizer step: the most that this rank holds of each kind, at the times when it is asked: start it
    before a forward pass, and call `forward_ended`, `ready_to_step` and `stepped` in this order; `stop` takes the hooks
    away. Activations are what autograd has saved when backward begins, with checkpointing the inputs of what is
    recomputed; full parameters that it saves count as gathered. The sum of the kinds' greatest values is a bound from
    above.
    """

    def __init__(self, module: nn.Module, held: Held, gathered: Held | None = None, *, device: torch.device) -> None:
        """Say what is looked at: ``held`` gives all that the rank holds but activations, ``gathered`` what is full for
        the moment, of engines that free it before forward ends; default: FSDP2's.
        """
        self.account = MemoryAccount()
        self._module, self._held = module, held
        self._gathered = gathered or partial(unsharded, module)
        self._saved: WeakSet[_Saved] = WeakSet()
        self._kept: list[_Saved] = []  # What selective checkpointing keeps, which autograd does not know of.
        # Not their addresses, which activations get as soon as an engine has freed what was gathered.
        self._full: WeakSet[torch.UntypedStorage] = WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._saving: saved_tensors_hooks | None = None

    def start(self) -> None:
        """Before forward: watch what autograd saves, and what is gathered for each module that has parameters."""
        self._note()
        # Before whose forward an engine gathers: FSDP2's units, and what has sharded parameters outside of them. No
        # others: a hook inside of what is compiled would be compiled with it, and once more without it.
        units = [part for part in self._module.modules() if isinstance(part, FSDPModule) and part is not self._module]
        inside = {part for unit in units for part in unit.modules()}
        outside = [part for part in self._module.modules() if part not in inside]
        for part in units + [part for part in outside if any(map(is_sharded, part.parameters(recurse=False)))]:
            # Its parameters are gathered by a hook of its engine's, which was there before.
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
            # In a module that the user compiles.
            return
        full = list(self._gathered())
        self.account = most(self.account, account(full))
        for each in full:
            if isinstance(each.tensor, Tensor):
                self._full.update(_untyped(each.tensor))

    def _note(self, saved: Iterable[_Saved] = ()) -> None:
        known: set[Storage] = set()
        kept = account(self._held(), known=known)
        kept += account((Resident(each.kind, "device", each.tensor) for each in saved), known=known)
        self.account = most(self.account, kept)

    def forward_ended(self) -> None:
        """Before backward: count what autograd has saved."""
        saved = [*self._saved, *self._kept]
        self._stop_watching()
        self._note(saved)
        self._full.clear()

    def ready_to_step(self) -> None:
        """Before the optimizer steps: count the gradients."""
        self._note()

    def stepped(self) -> MemoryAccount:
        """After the step: count the optimizer's state. The whole account."""
        self.stop()
        self._note()
        return self.account

    def failed(self) -> MemoryAccount:
        """In the middle of the step, which won't go on: count what there is."""
        saved = [*self._saved, *self._kept]
        self.stop()
        self._note(saved)
        return self.account

    def stop(self) -> None:
        self._stop_watching()
        self._saved = WeakSet()

    def _stop_watching(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if self._keep in SAVED_OBSERVERS:
            SAVED_OBSERVERS.remove(self._keep)
        self._kept = []
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.__exit__(None, None, None)


def largest(accounts: Sequence[MemoryAccount]) -> int:
    """The rank with the most bytes on its device; among equals with the most in all places."""
    totals = [[getattr(account, place).total for place in PLACES] for account in accounts]
    return max(range(len(totals)), key=lambda rank: (totals[rank][0], sum(totals[rank])))


def memory_table(
    account: MemoryAccount, *, title: str, notes: Sequence[str] = (), predicted: MemoryAccount | None = None
) -> str:
    """One rank's account below a title: a line for each kind, a column for each place (two if ``predicted``), notes."""
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
    "activations": "measured alone, so that no total is predicted; `lightning-shard plan` predicts them",
    "communication": "predicted at the peak of backward, counted at the end of it",
    "gradients": "predicted while a unit's full ones are not reduced yet, counted when all are",
}
"""Why a kind's measured bytes differ from those predicted."""


def suggestions(
    account: MemoryAccount, engine: EngineFacts, *, aligned: bool = False, checkpointing: bool = False
) -> dict[str, int | None]:
    """Settings that need less of a rank's device, and the bytes that they save (None: unknown), those that save most
    first. Presets of an ``aligned`` run keep the contract; ``checkpointing``: activations are checkpointed already.
    """
    activations, now = account.device.activations, sum(getattr(account.device, kind) for kind in STATES)
    found: dict[str, int | None] = {}
    for name, (sharded, offloaded) in engine.advised.items():
        after = 0.0
        for kind in STATES - offloaded:
            resident = getattr(account.device, kind) + getattr(account.host, kind)
            full = resident * (engine.shards if kind in engine.sharded else 1)
            after += full / (engine.ranks if kind in sharded else 1)
        # What is a hundredth less is not worth a line: paddings differ.
        if after < 0.99 * now:
            found[f"strategy: {name}{'_aligned' if aligned else ''}"] = round(now - after)
    found["half the batch size, with accumulate_grad_batches doubled"] = activations // 2 or None
    if not checkpointing:
        found["activation_checkpointing: units (at most, less what one unit keeps)"] = activations or None
    return dict(sorted(found.items(), key=lambda each: -1 if each[1] is None else each[1], reverse=True))


def advice(account: MemoryAccount, engine: EngineFacts, *, aligned: bool = False, checkpointing: bool = False) -> str:
    found = suggestions(account, engine, aligned=aligned, checkpointing=checkpointing)
    lines = [f"  {text}{'' if saves is None else f': {size_text(saves)} less'}" for text, saves in found.items()]
    return "\n".join(["What holds less on each rank's device, by this account:", *lines])


# c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDACachingAllocator.cpp, the CUDA runtime, cuBLAS.
_WORDS = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    *("cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, says so."""
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (isinstance(one, RuntimeError) and any(words in str(one) for words in _WORDS))
        for one in chain(error)
    )


def append_to_message(error: BaseException, text: str) -> None:
    """Let ``str(error)`` end with ``text``; the error's type and other arguments stay."""
    error.args = (f"{error.args[0] if error.args else type(error).__name__}\n{text}", *error.args[1:])
