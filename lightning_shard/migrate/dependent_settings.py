"""The target of a migration, and settings that depend on each other: sharding, mesh, offload, precision, saves."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_shard.engines.zero.config.reading import set_value
from lightning_shard.migrate.counterparts import CLASSES
from lightning_shard.migrate.neutral import LEVELS, MESH, Effect, Engine, Line, Reading


@dataclass(kw_only=True)
class Target:
    """A configuration for one engine."""

    engine: Engine
    arguments: dict[str, Any]  # The strategy's, nested as in YAML.
    told: bool  # True if the user gave the strategy's name. Its arguments hold against the sources then.
    reading: Reading
    trainer: dict[str, Any] = field(default_factory=dict)  # Arguments of the Trainer.
    top: dict[str, Any] = field(default_factory=dict)  # Further top-level keys.
    fixed: frozenset[str]  # Arguments of the name that the user gave.
    rows: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def stage(self) -> int:
        """ZeRO's stage, of a DeepSpeed target."""
        return int(self.arguments.get("stage", 2))

    def set(self, asked: Line, path: str, value: Any, note: str = "") -> None:
        """Write a setting at a path that begins with ``strategy.`` or ``trainer.``."""
        root, _, rest = path.partition(".")
        content = self.arguments if root == "strategy" else self.trainer
        set_value(content, rest, copy.deepcopy(value))
        self.note(asked, path, value, note)

    def note(self, asked: Line, path: str, value: Any, note: str = "") -> None:
        """Add a line to the table without writing anything."""
        self.rows.append(replace(asked, name=path, value=value, note="; ".join(filter(None, (asked.note, note)))))

    def hold(self, asked: Line, note: str) -> None:
        """Add a line for a setting that the engine has by itself, with the reason in ``note``."""
        self.note(asked, "", None, note)

    def lose(self, asked: Line, reason: str, nearest: str = "", effect: Effect = "numbers") -> None:
        self.reading.lose(asked.field, asked.given, reason, nearest, effect)


_AS_TOLD = "as --to says"


def _write_engine(target: Target, asked: Line) -> None:
    other = not target.told and target.engine != target.reading.engine
    note = "ZeRO's stage 0 shards nothing, which is the DDP engine" * other
    target.note(asked, "strategy", CLASSES[target.engine].rpartition(".")[2], note)


def _write_shard(target: Target, asked: Line) -> None:
    level, stage = LEVELS.index(asked.value), target.stage
    if target.told:
        kept = target.arguments.get("reshard_after_forward") is False
        done, shown = {
            "ddp": (0, "everything on every process"),
            "fsdp": (2, "parameters kept gathered after forward") if kept else (3, "parameters sharded"),
            "deepspeed": (stage, f"stage {stage}: {LEVELS[stage]} sharded"),
        }[target.engine]
        target.note(asked, "strategy", shown, _AS_TOLD * (done != level))
    elif target.engine == "deepspeed":
        target.set(asked, "strategy.stage", level)
    elif target.engine == "ddp":
        target.hold(asked, "nothing is sharded")
    elif asked.value == "none":
        target.set(asked, "strategy.mesh", {"replicate": "auto", "shard": 1}, "full copies, as DDP")
    elif asked.value == "gradients":
        target.set(asked, "strategy.reshard_after_forward", False)
    else:
        target.note(asked, "strategy.reshard_after_forward", "the default")


def _write_mesh(target: Target, asked: Line) -> None:
    copies = asked.value["replicate"]
    if target.engine == "fsdp" and asked.value == MESH:
        target.note(asked, "strategy.mesh", "the default")
    elif target.engine == "fsdp":
        target.set(asked, "strategy.mesh", asked.value)
    elif target.engine == "ddp":
        target.note(asked, "strategy", "full copies", _AS_TOLD if target.told else "")
    elif copies == 1:
        target.hold(asked, "DeepSpeed shards over all processes")
    else:
        reason = "DeepSpeed shards over all processes: 0.19 removed MiCS, and ZeRO++ hpZ only keeps a second copy of "
        target.lose(asked, f"{reason}the parameters", "--to shard_fsdp_hybrid", "speed")


def _write_reshard_ranks(target: Target, asked: Line) -> None:
    if target.engine == "fsdp" and "reshard_after_forward" in target.fixed:
        target.note(asked, "strategy.reshard_after_forward", target.arguments["reshard_after_forward"], _AS_TOLD)
    elif target.engine == "fsdp":
        target.set(asked, "strategy.reshard_after_forward", asked.value, "as hpZ: backward gathers from this part")
    elif target.engine == "deepspeed" and target.stage == 3:
        note = "backward gathers from a second copy of the parameters, sharded over so many ranks"
        target.set(asked, "strategy.zero_plus_plus.hpz_partition_size", asked.value, note)
    else:
        target.hold(asked, "parameters are not sharded, so there is nothing to gather")


_TOGETHER = "FSDP offloads parameters, gradients and optimizer state together, or nothing"


def _write_offload(target: Target, asked: Line) -> None:
    groups, device = [asked.name.partition(".")[0]], asked.value
    if asked.name == "cpu_offload":
        groups, device = ["offload_optimizer", "offload_parameters"], "cpu"
    if target.engine == "deepspeed":
        for group in groups:
            _write_zero_offload(target, asked, group, device)
    elif target.engine == "ddp":
        target.lose(asked, "DDP keeps everything on the device", "--to shard_fsdp_offload", "memory")
    elif device == "nvme" and "cpu_offload" in target.fixed:
        target.note(asked, "strategy.cpu_offload", True, f"in host memory, {_AS_TOLD}")
    elif device == "nvme":
        target.lose(asked, "FSDP keeps nothing in files", "--to shard_fsdp_offload, in host memory", "memory")
    else:
        other = "offload_parameters" if groups == ["offload_optimizer"] else "offload_optimizer"
        both = len(groups) == 2 or target.reading.value(f"{other}.device") == "cpu"
        if both or "cpu_offload" in target.fixed:
            note = "" if both else "parameters, gradients and optimizer state together"
            target.set(asked, "strategy.cpu_offload", True, note)
        else:
            target.lose(asked, _TOGETHER, "--to shard_fsdp_offload, which offloads all", "memory")


def _write_zero_offload(target: Target, asked: Line, group: str, device: str) -> None:
    """Write the device of an offload group, unless the name that the user gave says it."""
    least = 3 if group == "offload_parameters" or device == "nvme" else 1
    if target.stage < least and target.told:
        kept = "full parameters" if group == "offload_parameters" else "state"
        near, place = "--to shard_deepspeed_stage_3_offload", "on the device"
        if device == "nvme":
            near, place = f"{near}_nvme", "in memory"
        target.lose(asked, f"stage {target.stage} keeps {kept} {place}, stage {least} need not", near, "memory")
    elif group in target.fixed:
        there = target.arguments[group]["device"]
        target.note(asked, f"strategy.{group}.device", there, _AS_TOLD * (there != device))
    else:
        target.set(asked, f"strategy.{group}.device", device)


_NO_UNITS = "every repeated block, as there are no units"


def _write_activation_checkpointing(target: Target, asked: Line) -> None:
    units = "auto" if target.engine == "fsdp" else target.reading.value("units", "auto")
    value, note = asked.value, ""
    if value == "units" and isinstance(units, list) and units:
        value, note = units, "the classes that were shard units"
    elif value in ("units", "selective", "offload") and units != "auto":
        note = _NO_UNITS
    target.set(asked, "strategy.activation_checkpointing", value, note)


def _write_compile(target: Target, asked: Line) -> None:
    if target.engine == "deepspeed" and target.stage == 3 and asked.value:
        reason = "stage 3 gathers inside of the blocks, and a graph would end at every layer"
        target.lose(asked, reason, "--to shard_fsdp, or shard_deepspeed_stage_2", "speed")
    else:
        others = target.engine != "fsdp" and asked.value and target.reading.value("units", "auto") != "auto"
        target.set(asked, "strategy.compile", asked.value, _NO_UNITS * others)


def _write_accumulate_sync(target: Target, asked: Line) -> None:
    own = "boundary" if target.stage < 2 else "micro_batch"
    if target.engine != "deepspeed":
        target.set(asked, "strategy.accumulate_sync", asked.value)
    elif asked.value == own:
        target.hold(asked, f"so it is in stage {target.stage}")
    else:
        stages = "stage 1" if asked.value == "boundary" else "stages 2 and 3"
        target.lose(asked, f"stage {target.stage} reduces accumulated gradients by {own}", stages)


def _write_accumulate(target: Target, asked: Line) -> None:
    reading, note = target.reading, ""

    def reduced(engine: Engine | None, stage: int, aligned: bool) -> str:
        """Say when an engine, of any package, reduces accumulated gradients."""
        at_boundary = not aligned if engine == "ddp" else engine == "deepspeed" and stage < 2
        return "once at the boundary" if at_boundary else "after each micro-batch"

    if int(asked.value) > 1 and reading.value("accumulate_sync") is None:
        aligned = bool(reading.value("aligned"))
        before = reduced(reading.engine, LEVELS.index(reading.value("shard", "gradients")), aligned)
        if reading.engine == "fsdp" and asked.field != asked.name:
            # Accelerate and transformers' Trainer use FSDP's ``no_sync`` too, but Lightning uses DDP's alone.
            before = "once at the boundary"
        after = reduced(target.engine, target.stage, bool(target.arguments.get("aligned")) or aligned)
        if before != after:
            note = f"gradients are reduced {after}, and were {before}: other fp32 roundings"
            note += "; see accumulate_sync" * (target.engine != "deepspeed")
    target.set(asked, asked.name, asked.value, note)


def _write_override(target: Target, asked: Line) -> None:
    """Write ``reduce``, ``output`` and ``loss_scale`` to `ShardPrecision`, which replaces ``precision``."""
    precision = target.reading.value("precision")
    reduces_in_fp32 = str(precision or "32-true").endswith(("mixed", "32-true"))
    if asked.name == "loss_scale" and not str(precision).startswith("16"):
        target.hold(asked, "there is a loss scale in fp16 alone")
    elif asked.name == "reduce" and target.engine == "deepspeed":
        target.set(asked, "strategy.communication_data_type", asked.value)
    elif asked.name == "reduce" and asked.value == "fp32" and reduces_in_fp32:
        target.hold(asked, "gradients are reduced in fp32")
    elif precision is None:
        target.lose(asked, "it goes with a precision, and the source names none", "ShardPrecision")
    else:
        target.set(asked, f"trainer.plugins.{asked.name}", asked.value, "of ShardPrecision, in place of precision")


_ADAM: Mapping[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_SGD: Mapping[str, Any] = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
_OPTIMIZERS = {"adam": ("AdamW", _ADAM), "adamw": ("AdamW", _ADAM), "sgd": ("SGD", _SGD)}
"""DeepSpeed's ``type`` to torch's optimizer with DeepSpeed's defaults. Its Adam decays weights as AdamW does."""


def _write_optimizer(target: Target, asked: Line) -> None:
    """Write a DeepSpeed file's optimizer or scheduler. Other engines take it from the module or the YAML."""
    name = asked.name.partition(".")[2]
    key = "optimizer" if name == "optimizer" else "lr_scheduler"
    kind, given = str(asked.value.get("type")).lower(), dict(asked.value.get("params") or {})
    if target.engine == "deepspeed":
        target.set(asked, f"strategy.{asked.name}", asked.value)
        return
    decoupled = given.pop("adam_w_mode", True) or kind == "adamw"
    given.pop("torch_adam", None)
    for key, plain in (("bias_correction", True), ("amsgrad", False)):  # torch's defaults too
        if given.get(key) is plain:
            del given[key]
    known, defaults = _OPTIMIZERS.get(kind if name == "optimizer" and decoupled else "", ("", {}))
    if "auto" in given.values() or (not given and name == "scheduler"):
        target.hold(asked, f"its values are the script's: configure_optimizers, or `{key}:` in the YAML")
    elif not known or given.keys() - defaults.keys():
        reason = f"it comes from configure_optimizers, or `{key}:` in the YAML"
        target.lose(asked, reason, f"{key}: {{class_path: ...}}")
    else:
        target.top[name] = {"class_path": f"torch.optim.{known}", "init_args": {**defaults, **given}}
        target.note(asked, name, target.top[name]["class_path"], "in the YAML, which LightningCLI gives to the module")


def _write_division(target: Target, asked: Line) -> None:
    """Write the order of dividing and summing gradients, which gives the same mean."""
    scattered = target.arguments.get("buckets", {}).get("reduce_scatter") is not False
    if target.engine == "deepspeed" and not (target.stage > 1 and scattered):
        target.set(asked, f"strategy.{asked.name}", asked.value)
    else:
        target.hold(asked, "the mean is the same, but for its last digits; they are averaged in fp32 where masters are")


SPECIAL: Mapping[str, Callable[[Target, Line], None]] = {
    "engine": _write_engine,
    "shard": _write_shard,
    "mesh": _write_mesh,
    "reshard_ranks": _write_reshard_ranks,
    **dict.fromkeys(("cpu_offload", "offload_optimizer.device", "offload_parameters.device"), _write_offload),
    "activation_checkpointing": _write_activation_checkpointing,
    "compile": _write_compile,
    "accumulate_sync": _write_accumulate_sync,
    "trainer.accumulate_grad_batches": _write_accumulate,
    "precision": lambda target, asked: target.set(asked, "trainer.precision", asked.value),
    **dict.fromkeys(("reduce", "output", "loss_scale"), _write_override),
    **dict.fromkeys(("config.optimizer", "config.scheduler"), _write_optimizer),
    **dict.fromkeys(("config.prescale_gradients", "config.gradient_predivide_factor"), _write_division),
}
"""Setting to the function that adds it to a target. The other settings go by the table of counterparts."""


def complete_target(target: Target) -> None:
    """Replace the precision by `ShardPrecision` if that has more settings, and write ZeRO's default stage."""
    if overrides := target.trainer.pop("plugins", None):
        precision = target.trainer.pop("precision")
        if not target.reading.carried:
            # Over a YAML with a precision, this one has to unset it: Lightning takes one of the two.
            target.trainer["precision"] = None
        own = {"class_path": "lightning_shard.ShardPrecision", "init_args": {"precision": precision, **overrides}}
        kept = target.reading.carried.get("trainer", {}).get("plugins")
        others = kept if isinstance(kept, list) else [] if kept is None else [kept]
        target.trainer["plugins"] = [*others, own]
    if target.engine == "deepspeed":
        target.arguments.setdefault("stage", 2)
