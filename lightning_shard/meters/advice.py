"""What would hold less, by arithmetic on a rank's memory account."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_shard.engines.facts import Sharding
from lightning_shard.memory import MemoryAccount
from lightning_shard.meters.summary import size_text

_STEPPED = frozenset({"masters", "optimizer"})
_GRADIENTS = _STEPPED | {"gradients"}
_ALL = _GRADIENTS | {"parameters"}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A setting, and the bytes that it takes off a rank's device; None: no account says how many."""

    text: str
    saves: int | None


# What each name cuts over all ranks, and what of it is on the host.
_TARGETS: dict[str, tuple[tuple[str, frozenset[str], frozenset[str]], ...]] = {
    "fsdp": (("shard_fsdp", _ALL, frozenset()), ("shard_fsdp_offload", _ALL, _ALL)),
    "deepspeed": (
        ("shard_deepspeed_stage_1", _STEPPED, frozenset()),
        ("shard_deepspeed_stage_2", _GRADIENTS, frozenset()),
        ("shard_deepspeed_stage_3", _ALL, frozenset()),
        ("shard_deepspeed_stage_2_offload", _GRADIENTS, _GRADIENTS),
        ("shard_deepspeed_stage_3_offload", _ALL, _ALL),
    ),
}
_TARGETS["ddp"] = _TARGETS["fsdp"]


def suggestions(account: MemoryAccount, sharding: Sharding) -> list[Suggestion]:
    """The settings that would hold less on a rank's device, those that save most first."""
    found = [*_strategies(account, sharding), *_activations(account.device.activations, sharding)]
    return sorted(found, key=lambda suggestion: -1 if suggestion.saves is None else suggestion.saves, reverse=True)


def _strategies(account: MemoryAccount, sharding: Sharding) -> Iterator[Suggestion]:
    now = sum(getattr(account.device, kind) for kind in _ALL)
    for name, cut, on_host in _TARGETS.get(sharding.engine, ()):
        after = 0.0
        for kind in _ALL - on_host:
            held = getattr(account.device, kind) + getattr(account.host, kind)
            whole = held * (sharding.pieces if kind in sharding.cut else 1)
            after += whole / (sharding.ranks if kind in cut else 1)
        # What is a hundredth less is not worth a line: paddings differ.
        if after < 0.99 * now:
            suffix = "_aligned" if sharding.aligned else ""
            yield Suggestion(text=f"strategy: {name}{suffix}", saves=round(now - after))


def _activations(activations: int, sharding: Sharding) -> Iterator[Suggestion]:
    known = activations > 0
    yield Suggestion(
        text="half the batch size, with accumulate_grad_batches doubled", saves=activations // 2 if known else None
    )
    if not sharding.checkpointing:
        text = "activation_checkpointing: units (at most, less what one unit keeps)"
        yield Suggestion(text=text, saves=activations if known else None)


def advice(account: MemoryAccount, sharding: Sharding) -> str:
    """`suggestions` as lines to read."""
    lines = ["What holds less on each rank's device, by this account:"]
    for suggestion in suggestions(account, sharding):
        size = "" if suggestion.saves is None else f": {size_text(suggestion.saves)} less"
        lines.append(f"  {suggestion.text}{size}")
    return "\n".join(lines)
