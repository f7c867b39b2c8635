"""Read DeepSpeed files into neutral settings. ``engines/zero/config`` gives the keys their meaning."""

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from typing import Any

from lightning_shard.engines.zero.config.fields import DeepSpeedFields
from lightning_shard.engines.zero.config.keys import FOREIGN, REMOVED, TOP_LEVEL, configuration, names_of, section_of
from lightning_shard.engines.zero.config.reading import AUTO, ONE_BIT, is_off, pop_unavailable, value_at
from lightning_shard.engines.zero.config.zero_settings import (
    KEYS,
    SCALE_KEYS,
    TRAINER_OWNED,
    ZERO,
    loss_scaling_of,
    read_settings,
)
from lightning_shard.migrate.neutral import LEVELS, Field, Reading, described
from lightning_shard.text import nearest, parse_count

CAST_NOTE = "modules cast their parameters and inputs, autocast is not used"
PRECISION_NOTE = (
    "masters begin as the loaded values, not as their 16-bit rounding; gradients are reduced and summed in fp32; in "
    "bf16 a step with inf or NaN is taken, which DeepSpeed skips (nonfinite: skip)"
)
SCALE_NOTE = (
    "the loss scale doubles after 2000 good steps and falls at each overflow; DeepSpeed's after 1000, and at the second"
)
_OWN_SCALE_NOTE = "powers of two, so that scaling back does not round; the same rules as DeepSpeed's"

_OVERLAP_NOTE = "gradients are reduced while backward runs, which DeepSpeed's default in stages 1 and 2 is not"

_TRAINERS = described("deepspeed_file")

_DEFAULTS = {"buckets.reduce", "stage3.prefetch_bucket_size", "stage3.param_persistence_threshold"}
"""Typed fields that have the value "auto" in this package too."""

RENAMED = {
    "communication_data_type": Field(name="reduce", kind="str", words={n: n for n in ("fp32", "bf16", "fp16")}),
    "zero_plus_plus.hpz_partition_size": Field(name="reshard_ranks", kind="int", idle=(0, 1)),
}
"""Typed fields whose settings have other names."""


@cache
def library_defaults() -> Mapping[str, Any]:
    """Return the installed DeepSpeed's defaults by dotted key."""
    from deepspeed.runtime.config import DeepSpeedConfig

    own = DeepSpeedConfig({"train_batch_size": 1})
    found = {key: getattr(own, key) for key in TOP_LEVEL if hasattr(own, key) and not key.startswith("train_")}
    for name in ("activation_checkpointing", "aio", "flops_profiler"):
        section = getattr(own, f"{name}_config")
        keys = section if isinstance(section, dict) else vars(section)
        found |= {f"{name}.{key}": value for key, value in keys.items()}
    return found | dict(_model_defaults(configuration(), ""))


def _model_defaults(model: Any, path: str) -> Iterator[tuple[str, Any]]:
    for key in dict.fromkeys(names_of(model).values()):
        if inner := section_of(model, key):
            yield from _model_defaults(inner, f"{path}{key}.")
    if model.__name__ != "Section":  # a class of DeepSpeed
        for name, info in model.model_fields.items():
            yield f"{path}{info.alias or name}", info.get_default(call_default_factory=True)


def read_deepspeed(
    reading: Reading, content: Mapping[str, Any], prefix: str = "", *, stage: int | None = None, clips: bool = True
) -> None:
    """Read a DeepSpeed file in any spelling. ``prefix`` stands before field names in the table and in problems.

    The default of the stage is ``stage``, else DeepSpeed's. With ``clips`` DeepSpeed's default clipping holds.
    """
    if reading.engine is None:
        reading.engine = "deepspeed"
    content = dict(copy.deepcopy(content))
    _take_lost(reading, content, prefix)
    zero = {} if content.get(ZERO) is None else content[ZERO]
    given = zero.get("stage") if isinstance(zero, Mapping) else zero
    if given is None:
        content[ZERO] = {**zero, "stage": library_defaults()[f"{ZERO}.stage"] if stage is None else stage}
    if clips and content.get("gradient_clipping") is None:
        default = library_defaults()["gradient_clipping"]
        note = f"DeepSpeed's default; {_TRAINERS['gradient_clipping'].note}"
        reading.ask("trainer.gradient_clip_val", default, f"{prefix}gradient_clipping", None, note)
    problems: list[str] = []
    merged = read_settings(DeepSpeedFields(config=content), aligned=False, problems=problems).merged
    reading.problems += [f"{prefix}{problem}" for problem in problems]
    if problems:
        return
    note = "" if given is not None else "the default"
    reading.ask("shard", LEVELS[merged[ZERO]["stage"]], f"{prefix}{ZERO}.stage", given, note)
    _read_typed_keys(reading, merged, prefix)
    for key, field in _TRAINERS.items():
        if merged.get(key) == AUTO:
            reading.meet(f"{prefix}{key}", AUTO, f"the Trainer's {field.name.partition('.')[2]}")
        else:
            reading.read_field(f"{prefix}{key}", field, merged.get(key))
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


def _take_lost(reading: Reading, content: dict[str, Any], prefix: str) -> None:
    """Remove keys without a counterpart, which are noted, and keys that DeepSpeed itself does not read."""
    known = [*names_of(configuration()), *REMOVED, *FOREIGN]
    for key in [key for key in content if isinstance(key, str) and key not in known]:
        if not nearest(key, known):
            reading.meet(f"{prefix}{key}", content.pop(key), "DeepSpeed reads no such key")
    for key, reason in {**REMOVED, **FOREIGN}.items():
        if key in content and is_off(content[key]):
            reading.rest(f"{prefix}{key}", content.pop(key))
        elif key in content:
            reading.lose(f"{prefix}{key}", content.pop(key), reason)
    zero, fp16 = (content[name] if isinstance(content.get(name), dict) else {} for name in (ZERO, "fp16"))
    for path, value, reason in pop_unavailable(zero):
        near = "shard_fsdp_hybrid" if "mics" in path else ""
        reading.lose(f"{prefix}{ZERO}.{path}", value, reason.partition(":")[0], near)
    for path, (refused, reason) in TRAINER_OWNED.items():
        section, _, key = path.rpartition(".")
        holder = content.get(section) if section else content
        if isinstance(holder, dict) and str(holder.get(key)).lower() == str(refused).lower():
            reading.lose(f"{prefix}{path}", holder.pop(key), reason)
    if str(value_at(content, "optimizer.type")).lower() in ONE_BIT:
        reason = "DeepSpeed has removed the optimizers with compressed communication"
        reading.lose(f"{prefix}optimizer", content.pop("optimizer"), reason, "AdamW or Lamb in configure_optimizers")
    is_disabled = str(fp16.get("enabled", True)).lower() == "false"
    if fp16.get("loss_scale") not in (None, 0, AUTO, "0", 0.0) and not is_disabled:
        near = "fp16.initial_scale_power, to begin at such a scale"
        reading.lose(f"{prefix}fp16.loss_scale", fp16.pop("loss_scale"), "the loss scale is dynamic", near)
    if str(fp16.get("consecutive_hysteresis")).lower() == "true":
        value, reason = fp16.pop("consecutive_hysteresis"), "the hysteresis is refilled only when the scale grows"
        reading.lose(f"{prefix}fp16.consecutive_hysteresis", value, reason, "fp16.hysteresis")


def _read_typed_keys(reading: Reading, merged: Mapping[str, Any], prefix: str) -> None:
    if merged[ZERO]["stage"] in (1, 2) and merged[ZERO].get("overlap_comm") is None:
        reading.meet(f"{prefix}{ZERO}.overlap_comm", None, _OVERLAP_NOTE)
    for name, path in KEYS.items():
        value = value_at(merged, path)
        if value is None or name == "stage":
            continue
        if value == AUTO and name not in _DEFAULTS:
            reading.meet(f"{prefix}{path}", value, "DeepSpeed's own choice")
        elif name in RENAMED:
            reading.read_field(f"{prefix}{path}", RENAMED[name], value)
        else:
            reading.ask(name, value, f"{prefix}{path}", value)


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
        reading.ask("loss_scale", scale_of(scale), f"{prefix}fp16", scale, _OWN_SCALE_NOTE)
    elif scale and fp16.get("enabled") == AUTO:
        # The Trainer says the precision. The scale counts if that is fp16.
        own = all(_is_default(f"fp16.{key}", value) for key, value in scale.items())
        near = "" if own else f": ShardPrecision(loss_scale={scale_of(scale)})"
        reading.meet(f"{prefix}fp16", scale, f"it goes with precision 16-mixed{near}; {SCALE_NOTE}")
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
        elif _is_default(path, value) and path != "bf16.check_grad_overflow":  # here the default is another
            reading.rest(f"{prefix}{path}", value)
        else:
            reading.ask(f"config.{path}", value, f"{prefix}{path}", value)


def _is_default(path: str, value: Any) -> bool:
    """Say whether DeepSpeed does the same without a key: its default, or a section that is off or has defaults."""
    known = library_defaults()
    if isinstance(value, Mapping):
        enabled = value.get("enabled", known.get(f"{path}.enabled"))
        return enabled is False or all(_is_default(f"{path}.{key}", item) for key, item in value.items())
    return value is None or (path in known and bool(known[path] == value))
