"""Read DeepSpeed files into neutral settings. ``engines/zero/config`` gives the keys their meaning."""

import copy
from collections.abc import Mapping
from math import prod
from typing import Any

from lightning_shard.engines.zero.config.fields import DeepSpeedFields
from lightning_shard.engines.zero.config.keys import FOREIGN, REMOVED
from lightning_shard.engines.zero.config.reading import AUTO, is_off, pop_unavailable, value_at
from lightning_shard.engines.zero.config.zero_settings import KEYS, SCALE_KEYS, ZERO, loss_scaling_of, read_settings
from lightning_shard.migrate.neutral import LEVELS, Field, Reading, described
from lightning_shard.text import parse_count

CAST_NOTE = "modules cast their parameters and inputs, autocast is not used"
PRECISION_NOTE = (
    "masters begin as the loaded values, not as their 16-bit rounding; gradients are reduced and summed in fp32; in "
    "bf16 a step with inf or NaN is taken, which DeepSpeed skips (nonfinite: skip)"
)
SCALE_NOTE = (
    "the loss scale doubles after 2000 good steps and falls at each overflow; DeepSpeed's after 1000, and at the second"
)

_TRAINERS = described("deepspeed_file")

_AUTO_HERE_TOO = {"buckets.reduce", "stage3.prefetch_bucket_size", "stage3.param_persistence_threshold"}
"""Typed fields that have the value "auto" in this package too."""

RENAMED = {
    "communication_data_type": Field(name="reduce", words={n: n for n in ("fp32", "bf16", "fp16")}),
    "zero_plus_plus.hpz_partition_size": Field(name="reshard_ranks", idle=(0, 1)),
}
"""Typed fields whose settings have other names."""


def read_deepspeed(
    reading: Reading, content: Mapping[str, Any], prefix: str = "", *, stage: int = 0, clips: bool = True
) -> None:
    """Read a DeepSpeed file in any spelling. ``prefix`` stands before field names in the table and in problems.

    ``stage`` is its default, which is 0 in DeepSpeed. With ``clips`` DeepSpeed's default clipping holds.
    """
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    reading.engine = reading.engine or "deepspeed"
    content = dict(copy.deepcopy(content))
    for key, reason in {**REMOVED, **FOREIGN}.items():
        if key in content and not is_off(content[key]):
            reading.lose(f"{prefix}{key}", content.pop(key), reason)
        elif key in content:
            reading.rest(f"{prefix}{key}", content.pop(key))
    zero = {} if content.get(ZERO) is None else content[ZERO]
    for path, value, reason in pop_unavailable(zero) if isinstance(zero, dict) else ():
        reading.lose(f"{prefix}{ZERO}.{path}", value, reason)
    if isinstance(zero, Mapping) and zero.get("stage") is None:
        content[ZERO] = {**zero, "stage": stage}
    if clips and content.get("gradient_clipping") is None:
        note = f"DeepSpeed's default; {_TRAINERS['gradient_clipping'].note}"
        field = f"{prefix}gradient_clipping"
        reading.ask("trainer.gradient_clip_val", GRADIENT_CLIPPING_DEFAULT, field, None, note)
    problems: list[str] = []
    merged = read_settings(DeepSpeedFields(config=content), aligned=False, problems=problems).merged
    reading.problems += [f"{prefix}{problem}" for problem in problems]
    if problems:
        return
    given = zero.get("stage") if isinstance(zero, Mapping) else zero
    note = "" if given is not None else "the default"
    reading.ask("shard", LEVELS[merged[ZERO]["stage"]], f"{prefix}{ZERO}.stage", given, note)
    for name, path in KEYS.items():
        value, field = value_at(merged, path), f"{prefix}{path}"
        if value == AUTO and name not in _AUTO_HERE_TOO:
            reading.meet(field, value, "DeepSpeed's own choice")
        elif name in RENAMED:
            reading.read_field(field, RENAMED[name], value)
        elif value is not None and name != "stage":
            reading.ask(name, value, field, value)
    for key, described_ in _TRAINERS.items():
        if merged.get(key) == AUTO:
            reading.meet(f"{prefix}{key}", AUTO, f"the Trainer's {described_.name.partition('.')[2]}")
        else:
            reading.read_field(f"{prefix}{key}", described_, merged.get(key))
    _read_precision(reading, merged, prefix)
    _read_further_keys(reading, merged, prefix)


def check_batches(reading: Reading) -> None:
    """Derive accumulation from the batch keys (``_set_batch_related_parameters``), and refuse an impossible product.

    Called once all files are read, since another file may say the number of processes.
    """
    asked, trainer = {each.name: each for each in reading.asked}, reading.carried.get("trainer", {})
    whole, micro = (asked.get(f"config.train_{key}") for key in ("batch_size", "micro_batch_size_per_gpu"))
    steps = asked.get("trainer.accumulate_grad_batches")
    if whole is None:
        return
    nodes, devices = (reading.value(f"trainer.{key}", trainer.get(key)) for key in ("num_nodes", "devices"))
    processes = parse_count(devices) * int(nodes or 1) or None  # of all nodes, None if no file says it
    known = {each.field: each.value for each in (micro, steps) if each is not None}
    product = prod(known.values()) * (processes or 1)
    shown_product = " x ".join([*(f"{name} {value}" for name, value in known.items()), f"{processes or 'n'} processes"])
    exact = processes is not None and len(known) == 2
    if whole.value % product or (exact and whole.value != product):
        rule = "equal to" if exact else "a multiple of"
        reading.problems.append(f"{whole.field} is {whole.value}, but must be {rule} {shown_product}")
    elif micro is not None and steps is None and processes is not None:
        steps = whole.value // product
        reading.ask("trainer.accumulate_grad_batches", steps, whole.field, whole.value, f"over {shown_product}")
    elif micro is not None and steps is None:
        how = "DeepSpeed accumulates to it: set trainer.accumulate_grad_batches to it over"
        reading.meet(whole.field, whole.value, f"{how} {shown_product}")


def _read_precision(reading: Reading, merged: Mapping[str, Any], prefix: str) -> None:
    fp16 = merged.get("fp16", {})
    if fp16.get("auto_cast"):
        reading.meet(f"{prefix}fp16.auto_cast", True, "floating inputs are cast on every engine")
    given = {name: merged[name].get("enabled") for name in ("fp16", "bf16") if merged.get(name)}
    if on := next((name for name, enabled in given.items() if enabled is True), None):
        low = value_at(merged, f"{on}.{on}_master_weights_and_grads") is True
        became = f"{on.replace('fp16', '16')}-{'true' if low else 'mixed'}"
        reading.ask("precision", became, f"{prefix}{on}.enabled", True, "" if low else PRECISION_NOTE)
    elif AUTO in given.values():
        for name in given:
            reading.meet(f"{prefix}{name}.enabled", given[name], "the Trainer's precision")
    else:
        off = ", ".join(f"{prefix}{name}.enabled" for name in given) or f"{prefix}fp16, bf16"
        reading.ask("precision", "32-true", off, False if given else None)
    scale = {key: fp16[key] for key in SCALE_KEYS if key in fp16 and fp16[key] != AUTO}
    if scale and fp16.get("enabled") is True:
        note = "powers of two, so that scaling back does not round; the same rules as DeepSpeed's"
        reading.ask("loss_scale", scale_of(scale), f"{prefix}fp16", scale, note)
    elif scale and fp16.get("enabled") == AUTO:
        own = f"with precision 16-mixed it is ShardPrecision(loss_scale={scale_of(scale)})"
        reading.meet(f"{prefix}fp16", scale, f"{own}; {SCALE_NOTE}")
    elif fp16.get("enabled") is True:
        reading.meet(f"{prefix}fp16.loss_scale", fp16.get("loss_scale"), SCALE_NOTE)


def scale_of(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `LossScaling` arguments of keys of an ``fp16`` section."""
    scaling = loss_scaling_of({**keys, "enabled": True})
    assert scaling is not None
    return {name: getattr(scaling, name) for name in ("initial", "growth_interval", "hysteresis", "minimum")}


_HANDLED = {
    *("bf16.enabled", "bf16.bf16_master_weights_and_grads", "fp16.enabled", "fp16.fp16_master_weights_and_grads"),
    *("fp16.auto_cast", "fp16.consecutive_hysteresis", *(f"fp16.{key}" for key in SCALE_KEYS)),
    *(f"{ZERO}.leaf_module", *_TRAINERS, *KEYS.values()),
}


def _read_further_keys(reading: Reading, merged: Mapping[str, Any], prefix: str) -> None:
    """Read the further keys, which stay in ``config`` under DeepSpeed."""
    flat: dict[str, Any] = {}
    for key, value in merged.items():
        is_section = key in (ZERO, "fp16", "bf16", "data_types")
        flat |= {f"{key}.{inner}": item for inner, item in value.items()} if is_section else {key: value}
    for section in (f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"):
        flat |= {f"{section}.{key}": value for key, value in flat.pop(section, {}).items()}
    for path, value in flat.items():
        if path in _HANDLED:
            continue
        if value == AUTO:
            reading.meet(f"{prefix}{path}", value, "DeepSpeed's own choice, or the Trainer's")
        elif path == "activation_checkpointing":
            reason = "the strategy does not call deepspeed.checkpointing.configure"
            reading.lose(f"{prefix}{path}", value, reason, "activation_checkpointing: units", "memory")
        else:
            reading.ask(f"config.{path}", value, f"{prefix}{path}", value)
