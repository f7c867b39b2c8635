"""Read Lightning YAML, stock or with a strategy of this package, into neutral settings."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shard.engines.zero.config.reading import read_config
from lightning_shard.migrate import neutral
from lightning_shard.migrate.counterparts import CLASSES, TABLE
from lightning_shard.migrate.deepspeed_json import RENAMED, read_deepspeed
from lightning_shard.migrate.lightning_strategies import STRATEGIES, precision_of, read_stock
from lightning_shard.migrate.neutral import MESH, READ_ELSEWHERE, Engine, Field, Reading, nearest, shown
from lightning_shard.precision.policy import SHORT_FORMS
from lightning_shard.precision.words import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Known:
    """Names of Lightning and of the strategy registry, which this layer does not import."""

    # Strategy name, of this package or stock, to its class path and arguments.
    presets: Mapping[str, tuple[str, Mapping[str, Any]]]
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
        kind = _read_strategy(reading, "auto" if strategy is None else strategy, strategy is not None, known)
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
            note = _CLIP if key == "gradient_clip_val" and kind is not None and kind not in OWN_ENGINES else ""
            reading.ask(f"trainer.{key}", trainer[key], f"trainer.{key}", trainer[key], note)
    if kind == "SingleDeviceStrategy" and trainer.get("devices") is None:
        reading.ask("trainer.devices", 1, "trainer.strategy", strategy)
    reading.carried = copy.deepcopy({**content, "trainer": trainer})


_SHOWN = (
    "accelerator", "num_nodes", "devices", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches",
)  # fmt: skip
"""Arguments of the Trainer that are lines of the table."""

_CLIP = "one formula on every engine: the norm is summed in fp64 over all shards, then torch's"


def _read_strategy(reading: Reading, strategy: Any, named: bool, known: Known) -> str | None:
    """Read ``trainer.strategy``, stock or of this package. Return the name of its class."""
    field = "trainer.strategy"
    if isinstance(strategy, Mapping):
        path = strategy.get("class_path")
        arguments = {**(strategy.get("init_args") or {}), **(strategy.get("dict_kwargs") or {})}
        if not isinstance(path, str):
            reading.problems.append(f"{field} has no class_path: write a name, or class_path and init_args")
            return None
        others = [key for key in strategy if key not in ("class_path", "init_args", "dict_kwargs")]
        reading.problems += [f"{field}.{key} is none of the keys class_path, init_args, dict_kwargs" for key in others]
    elif isinstance(strategy, str) and strategy.lower() in known.presets:
        path, preset = known.presets[strategy.lower()]
        arguments = dict(preset)
    elif isinstance(strategy, str) and ("." in strategy or strategy.endswith("Strategy")):
        path, arguments = strategy, {}
    else:
        near = nearest(str(strategy), known.presets)
        reading.problems.append(
            f"{field} is {shown(strategy)!r}, but must be the name or the class of a strategy of this package, or of "
            f"stock DDP, FSDP, DeepSpeed or model parallelism{near}"
        )
        return None
    kind = path.rpartition(".")[2]
    holder, called = (f"{field}.init_args", path) if isinstance(strategy, Mapping) else (field, strategy)
    if kind in OWN_ENGINES:
        reading.engine = OWN_ENGINES[kind]
        reading.ask("engine", reading.engine, field, called)
        read_own(reading, reading.engine, arguments, holder)
    elif kind in STRATEGIES:
        reading.engine = STRATEGIES[kind][0]
        reading.ask("engine", reading.engine, field, called if named else None)
        read_stock(reading, kind, arguments, holder, named=isinstance(strategy, Mapping))
    else:
        reading.problems.append(
            f"{field} is {path!r}, which is not known here{nearest(kind, [*OWN_ENGINES, *STRATEGIES])}"
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
    elif precision in ("64-true", "transformer-engine", "transformer-engine-float16"):
        reason = "the engines here compute in fp32, bf16 and fp16"
        near = "32-true" if precision == "64-true" else "bf16-mixed"
        reading.lose("trainer.precision", given, reason, near)
    else:
        near = nearest(precision, PRECISIONS)
        reading.problems.append(f"trainer.precision is {given!r}, but must be one of {', '.join(PRECISIONS)}{near}")


_STOCK_PRECISION = ("MixedPrecision", "HalfPrecision", "FSDPPrecision", "DeepSpeedPrecision", "Precision")


_OWN_SCALE = Field(reason="the loss scale is this package's own", nearest="ShardPrecision(loss_scale=...)")


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
            arguments.pop("device", None)
            lost = {key: value for key, value in arguments.items() if value is not None}
            reading.read_fields("trainer.plugins", dict.fromkeys(lost, _OWN_SCALE), lost)
        else:
            kept.append(plugin)
    if len(kept) != len(plugins):
        trainer.pop("plugins")
        trainer |= {"plugins": kept} if kept else {}


OWN_ENGINES: Mapping[str, Engine] = {path.rpartition(".")[2]: engine for engine, path in CLASSES.items()}

_SYNC = {"accumulate_sync": Field(name="accumulate_sync", kind="str", idle=("auto",))}
_MESH = dict.fromkeys((f"mesh.{axis}" for axis in MESH), READ_ELSEWHERE)

SPECIAL: Mapping[Engine, Mapping[str, Field]] = {
    "ddp": _SYNC,
    "fsdp": {
        **_SYNC,
        **_MESH,
        "reshard_after_forward": READ_ELSEWHERE,
        "cpu_offload": Field(name="cpu_offload", kind="bool", idle=(False,)),
    },
    "deepspeed": {
        **_SYNC,
        **_MESH,
        "config": READ_ELSEWHERE,
        "stage": Field(name="shard", kind="int", words=dict(enumerate(neutral.LEVELS))),
        "offload_optimizer.device": Field(name="offload_optimizer.device", kind="str"),
        "offload_parameters.device": Field(name="offload_parameters.device", kind="str"),
        **RENAMED,
    },
}
"""Arguments that are not under their own name in the table of counterparts."""


def arguments_of(engine: Engine) -> dict[str, Field]:
    """Return every argument of an engine's strategy, groups with dots."""
    own = [name for name, row in TABLE.items() if engine not in row.answers and not name.startswith("trainer.")]
    return {**{name: Field(name=name, kind=TABLE[name].kind) for name in own}, **SPECIAL[engine]}


def read_own(reading: Reading, engine: Engine, arguments: Mapping[str, Any], path: str) -> None:
    known = arguments_of(engine)
    flat = _flatten(arguments, {name.partition(".")[0] for name in known if "." in name})
    reading.check_keys(path, flat, known, "the strategy")
    if flat.get("config") is not None:
        read_deepspeed(reading, read_config(flat["config"], f"{path}.config"), "config: ", stage=2, clips=False)
    reading.read_fields(path, known, flat)
    if _MESH.keys() & flat.keys():
        mesh = {axis: flat.get(f"mesh.{axis}", size) for axis, size in MESH.items()}
        reading.ask("mesh", mesh, f"{path}.mesh", mesh)
    if engine == "fsdp":
        given, field = flat.get("reshard_after_forward"), f"{path}.reshard_after_forward"
        if given is not None and not isinstance(given, int):
            reading.problems.append(f"{field} is {shown(given)!r}, but must be true, false or a number of ranks")
            return
        reading.ask("shard", "gradients" if given is False else "parameters", field, given)
        if given is not None and not isinstance(given, bool):
            reading.ask("reshard_ranks", given, field, given)
    elif engine == "deepspeed" and flat.get("stage") is None and flat.get("config") is None:
        reading.ask("shard", "gradients", f"{path}.stage", None, "the default is 2")


def _flatten(arguments: Mapping[str, Any], groups: set[str]) -> dict[str, Any]:
    """Flatten groups of arguments to keys with dots, but not ``config`` and ``preemption``."""
    flat: dict[str, Any] = {}
    for key, value in arguments.items():
        if key in groups and isinstance(value, Mapping):
            # An empty offload group means its default, the host.
            flat |= {f"{key}.device": "cpu"} if key.startswith("offload_") else {}
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if value is not None}
