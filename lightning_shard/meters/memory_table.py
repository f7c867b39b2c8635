"""Memory accounts as tables to read."""

from collections.abc import Sequence
from dataclasses import astuple

import torch

from lightning_shard.engines.facts import EngineFacts
from lightning_shard.memory import KINDS, KindBytes, MemoryAccount
from lightning_shard.meters.throughput import size_text
from lightning_shard.text import columns

PLACES = ("device", "host", "nvme")


def largest(accounts: Sequence[MemoryAccount]) -> int:
    """The rank with the most bytes on its device; among equals with the most in all places."""

    def total(rank: int) -> tuple[int, int]:
        return accounts[rank].device.total, sum(getattr(accounts[rank], place).total for place in PLACES)

    return max(range(len(accounts)), key=total)


def memory_table(
    account: MemoryAccount, *, title: str, notes: Sequence[str] = (), predicted: MemoryAccount | None = None
) -> str:
    """One rank's account below a title, with a line for each kind that it has, a column for each place, and notes.

    With ``predicted`` each place has a column of that too, and a note says why a kind that differs does.
    """
    accounts = {"": account} if predicted is None else {"": account, ", predicted": predicted}
    places = [place for place in PLACES if place == "device" or any(getattr(a, place).total for a in accounts.values())]
    cells = {f"{place}{whose}": getattr(a, place) for place in places for whose, a in accounts.items()}
    rows = [("", *cells)]
    for kind in KINDS:
        sizes = [getattr(found, kind) for found in cells.values()]
        if any(sizes):
            rows.append((kind, *(size_text(size) if size else "-" for size in sizes)))
    rows.append(("total", *(size_text(found.total) for found in cells.values())))
    if predicted is not None:
        differ = [kind for kind in _REASONS if getattr(account.device, kind) != getattr(predicted.device, kind)]
        notes = [*notes, *(f"{kind}: {_REASONS[kind]}" for kind in differ)]
    return "\n".join([title, columns(rows, numbers=True), *notes])


_REASONS = {
    "activations": "measured alone; `lightning-shard plan` predicts them",
    "communication": "predicted at the peak of backward, counted at the end of it",
}
"""Why a kind's measured bytes differ from those predicted."""


def to_numbers(account: MemoryAccount) -> list[int]:
    """The bytes of each kind in each place, for ranks to exchange."""
    return [number for place in astuple(account) for number in place]


def from_numbers(numbers: Sequence[int]) -> MemoryAccount:
    values = iter(numbers)
    return MemoryAccount(**{place: KindBytes(**dict(zip(KINDS, values, strict=False))) for place in PLACES})


_STEPPED = frozenset({"masters", "optimizer"})
_GRADIENTS = _STEPPED | {"gradients"}
_ALL = _GRADIENTS | {"parameters"}
_NONE: frozenset[str] = frozenset()

# Preset: the kinds that it shards over all ranks, and those that it offloads to the host.
PRESETS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "shard_fsdp": (_ALL, _NONE),
    "shard_fsdp_offload": (_ALL, _ALL),
    "shard_deepspeed_stage_1": (_STEPPED, _NONE),
    "shard_deepspeed_stage_2": (_GRADIENTS, _NONE),
    "shard_deepspeed_stage_3": (_ALL, _NONE),
    "shard_deepspeed_stage_2_offload": (_GRADIENTS, _GRADIENTS),
    "shard_deepspeed_stage_3_offload": (_ALL, _ALL),
}


def suggestions(
    account: MemoryAccount, engine: EngineFacts, *, aligned: bool = False, checkpointing: bool = False
) -> dict[str, int | None]:
    """Settings that need less of a rank's device, and the bytes that they take off it, those that save most first.

    None: no account says how many. The account is measured or predicted; suggested presets of an ``aligned`` run keep
    the precision contract too; ``checkpointing`` says whether activations are checkpointed already.
    """
    activations, now = account.device.activations, sum(getattr(account.device, kind) for kind in _ALL)
    found: dict[str, int | None] = {}
    for name, (sharded, offloaded) in PRESETS.items():
        after = 0.0
        for kind in _ALL - offloaded:
            resident = getattr(account.device, kind) + getattr(account.host, kind)
            full = resident * (engine.shards if kind in engine.sharded else 1)
            after += full / (engine.ranks if kind in sharded else 1)
        # What is a hundredth less is not worth a line: paddings differ.
        if name.startswith(engine.advised_presets) and after < 0.99 * now:
            found[f"strategy: {name}{'_aligned' if aligned else ''}"] = round(now - after)
    found["half the batch size, with accumulate_grad_batches doubled"] = activations // 2 or None
    if not checkpointing:
        found["activation_checkpointing: units (at most, less what one unit keeps)"] = activations or None
    return dict(sorted(found.items(), key=lambda each: -1 if each[1] is None else each[1], reverse=True))


def advice(account: MemoryAccount, engine: EngineFacts, *, aligned: bool = False, checkpointing: bool = False) -> str:
    """`suggestions` as lines to read."""
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
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        said = isinstance(following, RuntimeError) and any(words in str(following) for words in _WORDS)
        if said or isinstance(following, torch.OutOfMemoryError | MemoryError):
            return True
        seen.append(following)
        following = following.__cause__ or following.__context__
    return False


def append_to_message(error: BaseException, text: str) -> None:
    """Let ``str(error)`` end with ``text``; the error's type and other arguments stay."""
    error.args = (f"{error.args[0] if error.args else type(error).__name__}\n{text}", *error.args[1:])
