"""Migrate files to one configuration, with its table, its refusal and its YAML as text."""

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_shard.engines.zero.config.keys import TOP_LEVEL, UNMODELLED
from lightning_shard.engines.zero.config.reading import AUTO, read_file
from lightning_shard.engines.zero.config.zero_settings import ZERO
from lightning_shard.errors import ConfigurationError, raise_problems
from lightning_shard.migrate import dependent_settings
from lightning_shard.migrate.accelerate import TOP, read_accelerate
from lightning_shard.migrate.counterparts import CLASSES, find_row
from lightning_shard.migrate.deepspeed_json import check_batches, read_deepspeed
from lightning_shard.migrate.dependent_settings import Target
from lightning_shard.migrate.lightning_yaml import OWN_ENGINES, Known, merge, read_lightning
from lightning_shard.migrate.neutral import Engine, Line, Reading, shown
from lightning_shard.migrate.training_arguments import FIELDS, read_training_arguments
from lightning_shard.text import columns


def migrate(paths: Sequence[Path], known: Known, to: str | None = None) -> tuple[dict[str, Any], Target]:
    """Return the configuration for the strategy name ``to``, or for the source's own engine, and its target.

    Several Lightning YAMLs merge, as with ``--config``. One file of another kind may say the strategy.
    ConfigurationError: all mistakes in the files.
    """
    reading = _read_files(paths, known)
    raise_problems(reading.problems)
    assert reading.engine is not None  # else there were problems
    if to is None:
        replicates = reading.engine == "deepspeed" and reading.value("shard") == "none"
        target = build_target(reading, "ddp" if replicates else reading.engine, None)
    else:
        class_path, arguments = known.presets[to]
        target = build_target(reading, OWN_ENGINES[class_path.rpartition(".")[2]], arguments)
    raise_problems(target.problems)
    first: dict[str, Any] = {key: target.trainer.pop(key) for key in ("precision", "plugins") if key in target.trainer}
    carried = dict(reading.carried)
    kept = {key: value for key, value in carried.pop("trainer", {}).items() if key not in first}
    head = {key: carried.pop(key) for key in ("seed_everything",) if key in carried}
    trainer = {"strategy": _strategy_yaml(target, known), **first, **kept, **target.trainer}
    return {**head, "trainer": trainer, **target.top, **carried}, target


def _read_files(paths: Sequence[Path], known: Known) -> Reading:
    reading = Reading()
    files = [(path, read_file(path)) for path in paths]
    formats = [format_of(path, content, known) for path, content in files]
    others = [path.name for (path, _), kind in zip(files, formats, strict=True) if kind != "lightning"]
    if len(others) > 1:
        raise ConfigurationError(
            f"{' and '.join(others)} each say the whole strategy: give one of them, with any Lightning YAMLs. An "
            "Accelerate config file names its DeepSpeed file by deepspeed_config_file."
        )
    lightning: dict[str, Any] = {}
    for (path, content), kind in zip(files, formats, strict=True):
        if kind == "accelerate":
            read_accelerate(reading, content, path)
        elif kind == "deepspeed":
            reading.ask("engine", "deepspeed", path.name, "a DeepSpeed file")
            read_deepspeed(reading, content)
        elif kind == "transformers":
            read_training_arguments(reading, content)
        else:
            lightning = merge(lightning, content)
    if lightning:
        read_lightning(reading, lightning, known)
    if not reading.problems:
        check_batches(reading)
    return reading


def _strategy_yaml(target: Target, known: Known) -> Any:
    """Return the strategy for the YAML: a name if one has exactly these arguments, else class and arguments."""
    path = CLASSES[target.engine]
    for name, (class_path, arguments) in known.presets.items():
        if class_path == path and dict(arguments) == target.arguments:
            return name
    return {"class_path": path, "init_args": target.arguments} if target.arguments else {"class_path": path}


def format_of(path: Path, content: Mapping[str, Any], known: Known) -> str:
    """Return the format of a file by its top-level keys. ConfigurationError: it has none of the formats."""
    # Of equal scores the first counts: most keys that two formats share are DeepSpeed's.
    keys: Mapping[str, Collection[str]] = {
        "deepspeed": {*TOP_LEVEL, *UNMODELLED, ZERO, "fp16", "bf16", "bfloat16"},
        "accelerate": TOP,
        "transformers": {name for name, described in FIELDS.items() if not described.met}
        | {"per_device_train_batch_size", "output_dir", "num_train_epochs", "base_model", "micro_batch_size"},
        "lightning": known.top_keys,
    }
    scores = {name: sum(str(key) in own for key in content) for name, own in keys.items()}
    if isinstance(content.get("trainer"), Mapping):
        return "lightning"
    best = max(scores, key=lambda name: scores[name])
    if scores[best] == 0:
        raise ConfigurationError(
            f"{path} is none of the known formats: it has the keys {', '.join(map(repr, content)) or 'none'}, but an "
            "Accelerate config file has distributed_type, a DeepSpeed file zero_optimization, TrainingArguments "
            "per_device_train_batch_size, and a Lightning YAML trainer."
        )
    return best


def build_target(reading: Reading, engine: Engine, preset: Mapping[str, Any] | None) -> Target:
    """Write a reading for one engine. ``preset``: arguments of the strategy name that the user gave, None without one.

    A preset's arguments hold against the sources.
    """
    # Copied one by one: two groups of a preset may be one mapping.
    arguments = {name: copy.deepcopy(value) for name, value in (preset or {}).items()}
    told, fixed = preset is not None, frozenset(arguments)
    target = Target(engine=engine, arguments=arguments, told=told, fixed=fixed, reading=reading)
    for asked in _settings_in_order(reading, target.problems):
        dependent_settings.SPECIAL.get(asked.name, _write_by_table)(target, asked)
    dependent_settings.complete_target(target)
    target.rows += reading.met
    return target


def _settings_in_order(reading: Reading, problems: list[str]) -> list[Line]:
    """Return each setting once, in order of dependence. Values in files replace defaults."""
    said: dict[str, Line] = {}
    for asked in reading.asked:
        before = said.get(asked.name)
        if before is not None and before.value != asked.value and None not in (before.given, asked.given):
            problems.append(
                f"{before.field} is {shown(before.given)}, but {asked.field} is {shown(asked.given)}: make them equal, "
                "or remove one"
            )
        if asked.given is not None or before is None:
            said[asked.name] = asked
    kept = {(asked.name, asked.field): asked for asked in reading.asked if said[asked.name].value == asked.value}
    return sorted(kept.values(), key=lambda asked: (*_FIRST, asked.name).index(asked.name))


_FIRST = (
    "engine", "shard", "mesh", "reshard_ranks", "precision", "aligned", "units", "cpu_offload",
    "offload_optimizer.device", "offload_parameters.device",
)  # fmt: skip
"""Settings that others depend on."""


def _write_by_table(target: Target, asked: Line) -> None:
    in_fp32 = target.reading.value("precision", "32-true") == "32-true"
    answer = find_row(asked.name).answers.get(target.engine)
    group = asked.name.partition(".")[0]
    not_stage_3 = target.engine == "deepspeed" and target.stage < 3
    if asked.name in _ONLY_FP32 and target.engine == "ddp" and not in_fp32:
        reason = "only torch's DistributedDataParallel has it, for 32-true: other precisions run on FSDP2's replicate"
        target.lose(asked, reason, "precision: 32-true")
    elif asked.name in _GATHERING and not_stage_3:
        target.hold(asked, f"parameters are not sharded in stage {target.stage}, so that there is nothing to gather")
    elif answer is not None and answer.met:
        target.hold(asked, answer.met)
    elif answer is not None and any(type(asked.value) is type(idle) and asked.value == idle for idle in answer.idle):
        target.hold(asked, answer.note)
    elif answer is not None and asked.value == AUTO:
        target.hold(asked, "DeepSpeed's own choice was asked for")
    elif answer is not None:
        target.lose(asked, answer.reason, answer.nearest, answer.effect)
    elif asked.name.startswith("trainer."):
        target.set(asked, asked.name, asked.value)
    elif group.startswith("offload_") and group not in target.arguments:
        target.hold(asked, "nothing is offloaded")
    elif asked.name.endswith(".nvme_path") and target.arguments[group].get("device") != "nvme":
        target.hold(asked, "nothing is kept in files")
    elif group.startswith("stage3") and not_stage_3:
        target.hold(asked, "DeepSpeed reads it in stage 3 alone")
    elif _DEFAULTS.get(asked.name) == asked.value:
        target.note(asked, f"strategy.{asked.name}", "the default")
    else:
        target.set(asked, f"strategy.{asked.name}", asked.value)


# Options of torch's DistributedDataParallel, which `ShardDDPStrategy` refuses in 16 bits.
_ONLY_FP32 = (
    "static_graph", "gradient_as_bucket_view", "broadcast_buffers", "bucket_cap_mb", "comm_hook", "comm_state",
)  # fmt: skip
_DEFAULTS = {"units": "auto", "timeout_seconds": 1800.0, "start_method": "popen"}
_GATHERING = ("units", "forward_prefetch", "backward_prefetch")


_WIDEST = 44  # Longer cells stand below the table, each once.


def table(target: Target) -> str:
    """Return a line for each field with its setting and a note, then lost fields and fields that ask for nothing."""
    below: dict[str, int] = {}

    def cell(value: Any) -> str:
        text = value if isinstance(value, str) else shown(value)
        return text if len(text) <= _WIDEST else f"({below.setdefault(text, len(below) + 1)})"

    lines = [("source", "", "->", "target", "", "note")]
    for row in target.rows:
        value = cell(row.value) if row.name else ""
        lines.append((row.field, cell(row.given), "->", row.name or "(no setting)", value, cell(row.note)))
    lines += [(item.field, cell(item.given), "->", "none", "", cell(_reason(item))) for item in target.reading.lost]
    text = "\n".join([columns(lines), *(f"({number}) {note}" for note, number in below.items())])
    idle, others = (", ".join(each) for each in (target.reading.idle, target.reading.others))
    text += f"\nasking for nothing: {idle}" * bool(idle)
    return text + f"\nnot of sharding, precision or steps, see Lightning's Trainer: {others}" * bool(others)


def _reason(item: Line) -> str:
    return f"{item.note}; nearest: {item.nearest}" if item.nearest else item.note


def refusal(lost: Sequence[Line]) -> str:
    count = "1 field has" if len(lost) == 1 else f"{len(lost)} fields have"
    text = f"{count} no counterpart here, so that nothing was written:"
    for item in lost:
        near = f" Nearest: {item.nearest}." if item.nearest else ""
        text += f"\n  - {item.field}: {shown(item.given)}. {item.note[:1].upper()}{item.note[1:]}.{near}"
    return f"{text}\nWith --lossy the rest is written, and these stand in the file as comments."


def document(content: Mapping[str, Any], command: str, reading: Reading) -> str:
    """Return the text of the configuration, below comments with the command and the lost fields."""
    lines = [f"# Written by `{command}`."]
    lines += [f"# Not carried over: {item.field}: {shown(item.given)} ({_reason(item)})" for item in reading.lost]
    return "\n".join(lines) + "\n" + yaml.safe_dump(dict(content), sort_keys=False, width=100)
