"""Bytes counted on live tensors: what a rank holds now, and the most that it holds of each kind in one step."""

from collections.abc import Callable, Iterable, Iterator
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

from lightning_shard.engines.resident import Resident, is_sharded, unsharded
from lightning_shard.engines.transforms import SAVED_OBSERVERS
from lightning_shard.memory import KINDS, KindBytes, MemoryAccount, most
from lightning_shard.tensors.tracing import tree_leaves

Storage = tuple[torch.device, int]


def account(held: Iterable[Resident], *, known: set[Storage] | None = None) -> MemoryAccount:
    """The bytes of ``held``: of each storage once, whatever views there are, for the kind that is given first.

    A storage counts whole, a bucket with its padding too; those that are ``known`` count for nothing, and new ones are
    added to these.
    """
    known = set() if known is None else known
    places: dict[str, dict[str, int]] = {place: dict.fromkeys(KINDS, 0) for place in ("device", "host", "nvme")}
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


class StepMeter:
    """Measures one optimizer step: the most that this rank holds of each kind, at the times when it is asked.

    Activations are what autograd has saved when backward begins: with checkpointing the inputs of what is recomputed,
    and not what exists for a moment in between. Parameters that it saves whole, as a product's backward needs them,
    count as gathered. The kinds' greatest values need not be of one time: their sum is a bound from above.

    Start it before a forward pass, and call `forward_ended`, `ready_to_step` and `stepped` in this order. `stop` may be
    called at any time, and takes the hooks away.
    """

    def __init__(
        self,
        module: nn.Module,
        held: Callable[[], Iterable[Resident]],
        gathered: Callable[[], Iterable[Resident]] | None = None,
        *,
        device: torch.device,
    ) -> None:
        """Say what is looked at: ``held`` gives all that the rank holds but activations.

        ``gathered`` gives what is whole for the moment, of engines that free it before forward ends; default: FSDP2's.
        """
        self.account = MemoryAccount()
        self._module, self._held = module, held
        self._gathered = gathered or partial(unsharded, module)
        self._saved: WeakSet[_Saved] = WeakSet()
        self._kept: list[_Saved] = []  # What selective checkpointing keeps, which autograd does not know of.
        # Not their addresses, which activations get as soon as an engine has freed what was gathered.
        self._whole: WeakSet[torch.UntypedStorage] = WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._saving: saved_tensors_hooks | None = None

    def start(self) -> None:
        """Before forward: watch what autograd saves, and what is gathered for each module that has parameters."""
        self._note()
        for part in _gathering(self._module):
            # Its parameters are gathered by a hook of its engine's, which was there before.
            self._hooks.append(part.register_forward_pre_hook(lambda *_: self._note_gathered()))
        SAVED_OBSERVERS.append(self._keep)
        self._saving = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._saving.__enter__()

    def _pack(self, tensor: Tensor) -> _Saved:
        whole = any(storage in self._whole for storage in _untyped(tensor))
        saved = _Saved(tensor, "gathered" if whole else "activations")
        self._saved.add(saved)
        return saved

    def _keep(self, result: Any) -> None:
        self._kept += [_Saved(tensor, "activations") for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]

    def _note_gathered(self) -> None:
        if torch.compiler.is_compiling():
            # In a module that the user compiles.
            return
        whole = list(self._gathered())
        self.account = most(self.account, account(whole))
        for each in whole:
            if isinstance(each.tensor, Tensor):
                self._whole.update(_untyped(each.tensor))

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
        self._whole.clear()

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


def _gathering(module: nn.Module) -> list[nn.Module]:
    """The modules before whose forward an engine gathers: FSDP2's units, and those with cut parameters outside."""
    # No others: a hook inside of what is compiled would be compiled with it, and once more without it.
    units = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
    inside = {part for unit in units for part in unit.modules()}
    outside = [part for part in module.modules() if part not in inside]
    return units + [part for part in outside if any(map(is_sharded, part.parameters(recurse=False)))]
