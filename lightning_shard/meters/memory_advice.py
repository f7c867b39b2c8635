"""Settings that would need less memory, by arithmetic on a rank's memory account."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_shard.engines.facts import EngineFacts
from lightning_shard.memory import MemoryAccount
from lightning_shard.meters.throughput_summary import size_text

_STEPPED = frozenset({"masters", "optimizer"})
_GRADIENTS = _STEPPED | {"gradients"}
_ALL = _GRADIENTS | {"parameters"}
_NONE: frozenset[str] = frozenset()

# Preset: the kinds that it shards over all ranks, and those that it offloads to the host.
_PRESETS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "shard_fsdp": (_ALL, _NONE),
    "shard_fsdp_offload": (_ALL, _ALL),
    "shard_deepspeed_stage_1": (_STEPPED, _NONE),
    "shard_deepspeed_stage_2": (_GRADIENTS, _NONE),
    "shard_deepspeed_stage_3": (_ALL, _NONE),
    "shard_deepspeed_stage_2_offload": (_GRADIENTS, _GRADIENTS),
    "shard_deepspeed_stage_3_offload": (_ALL, _ALL),
}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A setting, and the bytes that it takes off a rank's device; None: no account says how many."""

    text: str
    saves: int | None


def suggestions(
    account: MemoryAccount, engine: EngineFacts, *, aligned: bool = False, checkpointing: bool = False
) -> list[Suggestion]:
    """The settings that need less of a rank's device, those that save most first.

    Args:
        account: of the run, measured or predicted.
        engine: of the run.
        aligned: whether the run keeps the precision contract, which the suggested presets are to keep too.
        checkpointing: whether activations are checkpointed already.
    """
    found = [*_presets(account, engine, aligned), *_activations(account.device.activations, checkpointing)]
    return sorted(found, key=lambda suggestion: -1 if suggestion.saves is None else suggestion.saves, reverse=True)


def _presets(account: MemoryAccount, engine: EngineFacts, aligned: bool) -> Iterator[Suggestion]:
    now = sum(getattr(account.device, kind) for kind in _ALL)
    for name, (sharded, offloaded) in _PRESETS.items():
        if not name.startswith(engine.advised_presets):
            continue
        after = 0.0
        for kind in _ALL - offloaded:
            resident = getattr(account.device, kind) + getattr(account.host, kind)
            full = resident * (engine.shards if kind in engine.sharded else 1)
            after += full / (engine.ranks if kind in sharded else 1)
        # What is a hundredth less is not worth a line: paddings differ.
        if after < 0.99 * now:
            suffix = "_aligned" if aligned else ""
            yield Suggestion(text=f"strategy: {name}{suffix}", saves=round(now - after))


def _activations(activations: int, checkpointing: bool) -> Iterator[Suggestion]:
    known = activations > 0
    yield Suggestion(
        text="half the batch size, with accumulate_grad_batches doubled", saves=activations // 2 if known else None
    )
    if not checkpointing:
        text = "activation_checkpointing: units (at most, less what one unit keeps)"
        yield Suggestion(text=text, saves=activations if known else None)


def advice(account: MemoryAccount, engine: EngineFacts, *, aligned: bool = False, checkpointing: bool = False) -> str:
    """`suggestions` as lines to read."""
    lines = ["What holds less on each rank's device, by this account:"]
    for suggestion in suggestions(account, engine, aligned=aligned, checkpointing=checkpointing):
        size = "" if suggestion.saves is None else f": {size_text(suggestion.saves)} less"
        lines.append(f"  {suggestion.text}{size}")
    return "\n".join(lines)
