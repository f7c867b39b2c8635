"""Read Lightning YAML, stock or with a strategy of this package, into neutral settings."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shard.engines.zero.config.reading import read_config
from lightning_shard.migrate.deepspeed_json import RENAMED, read_deepspeed
from lightning_shard.migrate.lightning_strategies import STRATEGIES, precision_of, read_stock
from lightning_shard.migrate.neutral import CLASSES, LEVELS, MESH, Engine, Field, Reading, nearest, shown
from lightning_shard.precision.policy import SHORT_FORMS
from lightning_shard.precision.words import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Known:
    """Names of Lightning and of this package's strategies, which this layer does not import."""

    # Strategy name, of this package or stock, to its class path and arguments.
    presets: Mapping[str, tuple[str, Mapping[str, Any]]]
    arguments: Mapping[Engine, Mapping[str, Any]]  # Each engine's arguments with their defaults.
    top_keys: Collection[str]  # Keys of ``lightning-shard fit`` outside of ``trainer``.
    trainer_keys: Collection[str]  # Arguments of the Trainer.


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge as several ``--config`` do: ``second`` replaces values, and a class with another path."""
    result = copy.deepcopy(dict(first))
    for key, value in second.items():
        there = result.get(key)
        path = there.get("class_path") if isinstance(there, Mapping) else None
        if isinstance(there, Mapping) and isinstance(value, Mapping) and value.get("class_path", path) == path:
            result[key] = merge(there, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


_SHOWN = (
    "accelerator", "num_nodes", "devices", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches",
)  # fmt: skip
"""Arguments of the Trainer that are lines of the table."""


def read_lightning(reading: Reading, content: Mapping[str, Any], known: Known) -> None:
    """Read a Lightning YAML. Everything but the strategy is carried over as it is."""
    for key in [key for key in content if key not in known.top_keys]:
        if near := nearest(str(key), known.top_keys):
            reading.problems.append(f"{key} is no key of `lightning-shard fit`{near}")
        else:
            reading.meet(str(key), content[key], "carried over, though it is no key of `lightning-shard fit`")
    section = content.get("trainer") or {}
    if not isinstance(section, Mapping):
        reading.problems.append(f"trainer is {shown(section)!r}, but must be a mapping of keys")
        return
    trainer: dict[str, Any] = copy.deepcopy(dict(section))
    # A key with a + adds to another file's list.
    keys = [*known.trainer_keys, *(f"{key}+" for key in known.trainer_keys)]
    reading.check_keys("trainer", trainer, keys, "the Trainer")
    strategy, kind = trainer.pop("strategy", None), None
    if reading.engine is None:
        kind = _read_strategy(reading, "auto" if strategy is None else strategy, known)
    else:
        # "auto" gives way to the value of another file.
        for key in _SHOWN:
            if trainer.get(key) == "auto" and reading.value(f"trainer.{key}") is not None:
                del trainer[key]
        if strategy not in (None, "auto"):
            problem = "but another file says the strategy too: remove one of the two"
            reading.problems.append(f"trainer.strategy is {shown(strategy)!r}, {problem}")
    _read_precision(reading, trainer, kind)
    for key in _SHOWN:
        if trainer.get(key) is not None:
            note = "the norm is summed in fp64 over all shards" * (key == "gradient_clip_val" and kind in STRATEGIES)
            reading.ask(f"trainer.{key}", trainer[key], f"trainer.{key}", trainer[key], note)
    if kind == "SingleDeviceStrategy" and trainer.get("devices") is None:
        reading.ask("trainer.devices", 1, "trainer.strategy", strategy)
    reading.carried = copy.deepcopy({**content, "trainer": trainer})


def _read_strategy(reading: Reading, strategy: Any, known: Known) -> str | None:
    """Read ``trainer.strategy``, stock or of this package. Return the name of its class."""
    field, path, arguments = "trainer.strategy", str(strategy), dict[str, Any]()
    is_class = isinstance(strategy, Mapping)
    if is_class:
        path = str(strategy.get("class_path"))
        arguments = {**(strategy.get("init_args") or {}), **(strategy.get("dict_kwargs") or {})}
        reading.check_keys(field, strategy, ("class_path", "init_args", "dict_kwargs"), "a class")
    elif path.lower() in known.presets:
        path, preset = known.presets[path.lower()]
        arguments = dict(preset)
    kind = path.rpartition(".")[2]
    holder, called = (f"{field}.init_args", path) if is_class else (field, strategy)
    if kind in OWN_ENGINES:
        reading.engine = OWN_ENGINES[kind]
        reading.ask("engine", reading.engine, field, called)
        _read_own(reading, reading.engine, arguments, holder, known.arguments[reading.engine])
    elif kind in STRATEGIES:
        reading.engine = STRATEGIES[kind][0]
        reading.ask("engine", reading.engine, field, called)
        read_stock(reading, kind, arguments, holder, named=is_class)
    else:
        near = nearest(kind, [*known.presets, *OWN_ENGINES, *STRATEGIES])
        reading.problems.append(
            f"{field} is {shown(strategy)!r}, but must be the name or the class of a strategy of this package, or of "
            f"stock DDP, FSDP, DeepSpeed or model parallelism{near}"
        )
        return None
    return kind


def _read_precision(reading: Reading, trainer: dict[str, Any], kind: str | None) -> None:
    _read_plugins(reading, trainer, kind)
    if (given := trainer.pop("precision", None)) is None:
        return
    precision = SHORT_FORMS.get(str(given), str(given))
    if precision in PRECISIONS:
        became, note = precision_of(kind, precision)
        reading.ask("precision", became, "trainer.precision", given, note)
    elif precision.startswith(("64", "transformer-engine")):
        reading.lose(
            "trainer.precision", given, "the engines here compute in fp32, bf16 and fp16", "bf16-mixed, 32-true"
        )
    else:
        near = nearest(precision, PRECISIONS)
        reading.problems.append(f"trainer.precision is {given!r}, but must be one of {', '.join(PRECISIONS)}{near}")


_STOCK_PRECISION = ("MixedPrecision", "HalfPrecision", "FSDPPrecision", "DeepSpeedPrecision", "Precision")


def _read_plugins(reading: Reading, trainer: dict[str, Any], kind: str | None) -> None:
    """Read the precision plugins in ``trainer.plugins`` and remove them. Other plugins stay."""
    given, kept = trainer.get("plugins"), []
    plugins = given if isinstance(given, list) else [given] if given is not None else []
    for plugin in plugins:
        described = plugin if isinstance(plugin, Mapping) else {"class_path": plugin}
        path, arguments = described.get("class_path"), dict(described.get("init_args") or {})
        name = str(path).rpartition(".")[2]
        if name == "ShardPrecision":
            for key, value in {"precision": "32-true", **arguments}.items():
                if value is not None:
                    reading.ask(key, value, f"trainer.plugins.{key}", value)
        elif name in _STOCK_PRECISION and "precision" in arguments:
            became, note = precision_of(kind, str(arguments.pop("precision")))
            reading.ask("precision", became, "trainer.plugins", path, note)
            for key in arguments.keys() - {"device"}:
                near = "ShardPrecision(loss_scale=...)"
                reading.lose(f"trainer.plugins.{key}", arguments[key], "the loss scale is this package's own", near)
        else:
            kept.append(plugin)
    if len(kept) != len(plugins):
        trainer.pop("plugins")
        trainer |= {"plugins": kept} if kept else {}


OWN_ENGINES: Mapping[str, Engine] = {path.rpartition(".")[2]: engine for engine, path in CLASSES.items()}

_STAGE = Field(name="shard", words=dict(enumerate(LEVELS)))
_GROUPS = ("offload_optimizer", "offload_parameters", "buckets", "stage3", "zero_plus_plus")


def _read_own(
    reading: Reading, engine: Engine, arguments: Mapping[str, Any], path: str, defaults: Mapping[str, Any]
) -> None:
    """Read the arguments of an engine's strategy. Each is a setting of the same name, but for a few."""
    reading.check_keys(path, arguments, defaults, "the strategy")
    given = {key: value for key, value in arguments.items() if value is not None}
    stage, config, reshard = (given.pop(key, None) for key in ("stage", "config", "reshard_after_forward"))
    if config is not None:
        read_deepspeed(reading, read_config(config, f"{path}.config"), "config: ", stage=2, clips=False)
    elif engine == "deepspeed" and stage is None:
        reading.ask("shard", "gradients", f"{path}.stage", None, "the default is 2")
    reading.read_field(f"{path}.stage", _STAGE, stage)
    if engine == "fsdp":
        field = f"{path}.reshard_after_forward"
        reading.ask("shard", "gradients" if reshard is False else "parameters", field, reshard)
        if reshard is not None and not isinstance(reshard, bool):
            reading.ask("reshard_ranks", reshard, field, reshard)
    if isinstance(mesh := given.pop("mesh", None), Mapping):
        reading.ask("mesh", {**MESH, **mesh}, f"{path}.mesh", mesh)
    elif mesh is not None:
        reading.problems.append(f"{path}.mesh is {shown(mesh)}, but must be a mapping of axes to sizes")
    for group in _GROUPS:
        if isinstance(given.get(group), Mapping):
            # An empty offload group means its default, the host.
            device = {"device": "cpu"} if group.startswith("offload_") else {}
            given |= {f"{group}.{key}": value for key, value in {**device, **given.pop(group)}.items()}
    for name, value in given.items():
        if name in RENAMED:
            reading.read_field(f"{path}.{name}", RENAMED[name], value)
        elif name in defaults and defaults[name] == value:
            reading.rest(f"{path}.{name}", value)
        else:
            reading.ask(name, value, f"{path}.{name}", value)
