"""Migrate files to one configuration, with its table, its refusal and its YAML as text."""

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_shard.engines.zero.config.keys import TOP_LEVEL, UNMODELLED
from lightning_shard.engines.zero.config.reading import read_file
from lightning_shard.engines.zero.config.zero_settings import ZERO
from lightning_shard.errors import ConfigurationError, raise_problems
from lightning_shard.migrate.accelerate import TOP, read_accelerate
from lightning_shard.migrate.counterparts import Target, write_precision, write_setting
from lightning_shard.migrate.deepspeed_json import check_batches, read_deepspeed
from lightning_shard.migrate.lightning_yaml import OWN_ENGINES, Known, merge, read_lightning
from lightning_shard.migrate.neutral import CLASSES, Line, Reading, shown
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
    engine, preset = reading.engine, None
    if to is not None:
        path, preset = known.presets[to]
        engine = OWN_ENGINES[path.rpartition(".")[2]]
    elif engine == "deepspeed" and reading.value("shard") == "none":
        engine = "ddp"
    # Copied one by one: two groups of a preset may be one mapping.
    arguments = {name: copy.deepcopy(value) for name, value in (preset or {}).items()}
    target = Target(engine=engine, arguments=arguments, preset=preset, known=known.arguments, reading=reading)
    for asked in _settings_in_order(reading):
        write_setting(target, asked)
    raise_problems(reading.problems)
    write_precision(target)
    target.rows += reading.met
    first = {key: target.trainer.pop(key) for key in ("precision", "plugins") if key in target.trainer}
    carried = dict(reading.carried)
    kept = {key: value for key, value in carried.pop("trainer", {}).items() if key not in first}
    head = {key: carried.pop(key) for key in ("seed_everything",) if key in carried}
    trainer = {"strategy": _strategy_yaml(target, known), **first, **kept, **target.trainer}
    return {**head, "trainer": trainer, **target.top, **carried}, target


def _read_files(paths: Sequence[Path], known: Known) -> Reading:
    reading, lightning, others = Reading(), dict[str, Any](), list[str]()
    for path in paths:
        content = read_file(path)
        kind = format_of(path, content, known)
        if kind == "lightning":
            lightning = merge(lightning, content)
            continue
        others.append(path.name)
        if kind == "accelerate":
            read_accelerate(reading, content, path)
        elif kind == "deepspeed":
            reading.ask("engine", "deepspeed", path.name, "a DeepSpeed file")
            read_deepspeed(reading, content)
        else:
            read_training_arguments(reading, content)
    if len(others) > 1:
        raise ConfigurationError(
            f"{' and '.join(others)} each say the whole strategy: give one of them, with any Lightning YAMLs. An "
            "Accelerate config file names its DeepSpeed file by deepspeed_config_file."
        )
    if lightning:
        read_lightning(reading, lightning, known)
    if not reading.problems:
        check_batches(reading)
    return reading


def _strategy_yaml(target: Target, known: Known) -> Any:
    """Return the strategy for the YAML: a name if one has exactly these arguments, else class and arguments."""
    path = CLASSES[target.engine]
    if target.engine == "deepspeed":
        target.arguments.setdefault("stage", 2)
    for name, (class_path, arguments) in known.presets.items():
        if class_path == path and dict(arguments) == target.arguments:
            return name
    return {"class_path": path, "init_args": target.arguments} if target.arguments else {"class_path": path}


def format_of(path: Path, content: Mapping[str, Any], known: Known) -> str:
    """Return the format of a file by its top-level keys. ConfigurationError: it has none of the formats."""
    if isinstance(content.get("trainer"), Mapping):
        return "lightning"
    # Of equal scores the first counts: most keys that two formats share are DeepSpeed's.
    keys: Mapping[str, Collection[str]] = {
        "deepspeed": {*TOP_LEVEL, *UNMODELLED, ZERO, "fp16", "bf16", "bfloat16"},
        "accelerate": TOP,
        "transformers": {name for name, described in FIELDS.items() if not described.met}
        | {"per_device_train_batch_size", "output_dir", "num_train_epochs", "base_model", "micro_batch_size"},
        "lightning": known.top_keys,
    }
    scores = {name: sum(str(key) in own for key in content) for name, own in keys.items()}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] == 0:
        raise ConfigurationError(
            f"{path} is none of the known formats: it has the keys {', '.join(map(repr, content)) or 'none'}, but an "
            "Accelerate config file has distributed_type, a DeepSpeed file zero_optimization, TrainingArguments "
            "per_device_train_batch_size, and a Lightning YAML trainer."
        )
    return best


def _settings_in_order(reading: Reading) -> list[Line]:
    """Return each setting once, in order of dependence. Values in files replace defaults."""
    said: dict[str, Line] = {}
    for asked in reading.asked:
        before = said.get(asked.name)
        if before is not None and before.value != asked.value and None not in (before.given, asked.given):
            reading.problems.append(
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
    lines = [f"  - {item.field}: {shown(item.given)} ({_reason(item)})" for item in lost]
    first = f"fields without a counterpart here: {len(lost)}, so that nothing was written:"
    return "\n".join([first, *lines, "With --lossy the rest is written, and these stand in the file as comments."])


def document(content: Mapping[str, Any], command: str, reading: Reading) -> str:
    """Return the text of the configuration, below comments with the command and the lost fields."""
    lines = [f"# Written by `{command}`."]
    lines += [f"# Not carried over: {item.field}: {shown(item.given)} ({_reason(item)})" for item in reading.lost]
    return "\n".join(lines) + "\n" + yaml.safe_dump(dict(content), sort_keys=False, width=100)
