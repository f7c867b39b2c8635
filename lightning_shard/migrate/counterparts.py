"""Write settings for one engine. Most are named like its argument. Those that depend on each other have a function."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_shard.engines.zero.config.reading import AUTO, set_value, value_at
from lightning_shard.migrate.neutral import CLASSES, LEVELS, MESH, Effect, Engine, Line, Reading

_NAMES: Mapping[Engine, str] = {"ddp": "shard_ddp", "fsdp": "shard_fsdp", "deepspeed": "shard_deepspeed_stage_2"}


@dataclass(kw_only=True)
class Target:
    """A configuration for one engine."""

    engine: Engine
    arguments: dict[str, Any]  # The strategy's, nested as in YAML.
    preset: Mapping[str, Any] | None  # Arguments of the name that the user gave, which hold against the sources.
    known: Mapping[Engine, Mapping[str, Any]]  # Each engine's arguments with their defaults.
    reading: Reading
    trainer: dict[str, Any] = field(default_factory=dict)  # Arguments of the Trainer.
    top: dict[str, Any] = field(default_factory=dict)  # Further top-level keys.
    rows: list[Line] = field(default_factory=list)

    @property
    def told(self) -> bool:
        return self.preset is not None

    @property
    def stage(self) -> int:
        """ZeRO's stage, of a DeepSpeed target."""
        return int(self.arguments.get("stage", 2))

    def fixed(self, path: str) -> Any:
        """Return the value that the user's name has at a path, None without one."""
        return value_at(self.preset or {}, path)

    def set(self, asked: Line, path: str, value: Any, note: str = "") -> None:
        """Write a setting at a path below ``strategy`` or ``trainer``. A value of the user's name holds against it."""
        root, _, rest = path.partition(".")
        if root == "strategy" and (there := self.fixed(rest)) is not None:
            self.note(asked, path, there, "as --to says" * (there != value))
            return
        set_value(self.arguments if root == "strategy" else self.trainer, rest, copy.deepcopy(value))
        self.note(asked, path, value, note)

    def note(self, asked: Line, path: str, value: Any, note: str = "") -> None:
        """Add a line to the table without writing anything."""
        self.rows.append(replace(asked, name=path, value=value, note="; ".join(filter(None, (asked.note, note)))))

    def hold(self, asked: Line, note: str) -> None:
        """Add a line for a setting that the engine has by itself, with the reason in ``note``."""
        self.note(asked, "", None, note)

    def lose(self, asked: Line, reason: str, nearest: str = "", effect: Effect = "numbers") -> None:
        self.reading.lose(asked.field, asked.given, reason, nearest, effect)


_EFFECTS: Mapping[str, Effect] = {
    **dict.fromkeys(("units", "ignored_modules", "gradient_as_bucket_view", "stage3"), "memory"),
    **dict.fromkeys(("offload_optimizer", "offload_parameters"), "memory"),
    **dict.fromkeys(("forward_prefetch", "backward_prefetch", "separate_reduce_scatter", "symmetric_memory"), "speed"),
    **dict.fromkeys(("custom_all_gather", "static_graph", "bucket_cap_mb", "start_method", "buckets"), "speed"),
    "config": "speed",
}
"""Changed by an argument that the engine lacks. Other arguments change numbers."""

_NUMBERS = ("config.gradient_allreduce_op", "config.torch_autocast", "config.data_types", "config.bf16", "config.fp16")
"""Keys in ``config`` that change numbers."""

_IDLE: Mapping[str, Any] = {
    "broadcast_buffers": (True,),
    "config.gradient_allreduce_op": ("mean",),
    "config.data_types.grad_accum_dtype": ("fp32", "float32", "torch.float32"),
}
"""Values that other engines do anyway. Of other arguments these are false, 0, auto and empty ones."""

_ONLY_FP32 = (
    "static_graph", "gradient_as_bucket_view", "broadcast_buffers", "bucket_cap_mb", "comm_hook", "comm_state",
)  # fmt: skip
"""Options of torch's DistributedDataParallel, which `ShardDDPStrategy` refuses in 16 bits."""


def write_setting(target: Target, asked: Line) -> None:
    name, value, engine = asked.name, asked.value, target.engine
    root, lacking = name.partition(".")[0], name.partition(".")[0] not in target.known[engine]
    if special := _SPECIAL.get(name):
        special(target, asked)
    elif root == "trainer":
        target.set(asked, name, value)
    elif name in _ONLY_FP32 and engine == "ddp" and target.reading.value("precision", "32-true") != "32-true":
        reason = "only torch's DistributedDataParallel has it, for 32-true: other precisions run on FSDP2's replicate"
        target.lose(asked, reason, "precision: 32-true")
    elif lacking and (value in _IDLE.get(name, (False, AUTO, 0, "", [])) or _is_off(value)):
        target.hold(asked, "it is so anyway")
    elif name.startswith("config.train_") and lacking:
        target.hold(asked, "the batch size is the dataloader's: give it there")
    elif name == "forward_methods" and engine == "deepspeed":
        target.hold(asked, "any method may run the model")
    elif lacking:
        others = " or ".join(_NAMES[other] for other in CLASSES if root in target.known[other])
        effect = "numbers" if name.startswith(_NUMBERS) else _EFFECTS.get(root, "numbers")
        target.lose(asked, f"{CLASSES[engine].rpartition('.')[2]} has no such argument", f"--to {others}", effect)
    elif root.startswith("offload_") and root not in target.arguments:
        target.hold(asked, "nothing is offloaded")
    elif name.endswith(".nvme_path") and target.arguments[root].get("device") != "nvme":
        target.hold(asked, "nothing is kept in files")
    elif target.known[engine].get(name, value) == value and name in target.known[engine]:
        target.note(asked, f"strategy.{name}", "the default")
    else:
        target.set(asked, f"strategy.{name}", value)


def _is_off(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("enabled") is False


def _write_engine(target: Target, asked: Line) -> None:
    other = not target.told and target.engine != target.reading.engine
    note = "ZeRO's stage 0 shards nothing, which is the DDP engine" * other
    target.note(asked, "strategy", CLASSES[target.engine].rpartition(".")[2], note)


def _write_shard(target: Target, asked: Line) -> None:
    level = LEVELS.index(asked.value)
    if target.engine == "deepspeed":
        target.set(asked, "strategy.stage", level)
    elif target.engine == "ddp":
        target.hold(asked, "nothing is sharded")
    elif target.told:
        kept = target.fixed("reshard_after_forward") is False
        target.hold(asked, "parameters stay gathered after forward" if kept else "parameters are sharded")
    elif asked.value == "none":
        target.set(asked, "strategy.mesh", {"replicate": AUTO, "shard": 1}, "full copies, as DDP")
    elif asked.value == "gradients":
        target.set(asked, "strategy.reshard_after_forward", False)
    else:
        target.note(asked, "strategy.reshard_after_forward", "the default")


def _write_mesh(target: Target, asked: Line) -> None:
    if target.engine == "fsdp" and asked.value == MESH:
        target.note(asked, "strategy.mesh", "the default")
    elif target.engine == "fsdp":
        target.arguments["mesh"] = dict(asked.value)
        target.note(asked, "strategy.mesh", asked.value)
    elif target.engine == "ddp":
        target.note(asked, "strategy", "full copies", "as --to says")
    elif asked.value["replicate"] == 1:
        target.hold(asked, "DeepSpeed shards over all processes")
    else:
        reason = "DeepSpeed shards over all processes: 0.19 removed MiCS, and hpZ is a second copy of parameters"
        target.lose(asked, reason, "--to shard_fsdp_hybrid", "speed")


def _write_reshard_ranks(target: Target, asked: Line) -> None:
    note = "backward gathers from a second copy of the parameters, sharded over so many ranks"
    if target.engine == "fsdp":
        target.set(asked, "strategy.reshard_after_forward", asked.value, note)
    elif target.engine == "deepspeed" and target.stage == 3:
        target.set(asked, "strategy.zero_plus_plus.hpz_partition_size", asked.value, note)
    else:
        target.hold(asked, "parameters are not sharded, so there is nothing to gather")


def _write_offload(target: Target, asked: Line) -> None:
    groups, device = [asked.name.partition(".")[0]], asked.value
    if asked.name == "cpu_offload":
        groups, device = ["offload_optimizer", "offload_parameters"], "cpu"
    both = all(target.reading.value(f"{group}.device") for group in ("offload_optimizer", "offload_parameters"))
    if asked.value is False:
        target.hold(asked, "nothing is offloaded")
    elif target.engine == "deepspeed":
        for group in groups:
            least = 3 if group == "offload_parameters" or device == "nvme" else 1
            if target.told and target.stage < least:
                reason = f"stage {target.stage} can't offload it to {device}, stage {least} can"
                near = "--to shard_deepspeed_stage_3_offload" + "_nvme" * (device == "nvme")
                target.lose(asked, reason, near, "memory")
            else:
                target.set(asked, f"strategy.{group}.device", device)
    elif target.engine == "ddp":
        target.lose(asked, "DDP keeps everything on the device", "--to shard_fsdp_offload", "memory")
    elif target.fixed("cpu_offload") or len(groups) == 2 or (both and device == "cpu"):
        target.set(asked, "strategy.cpu_offload", True)
    else:
        reason = "FSDP offloads parameters, gradients and optimizer state together, to the host, or nothing"
        target.lose(asked, reason, "--to shard_fsdp_offload", "memory")


def _write_activation_checkpointing(target: Target, asked: Line) -> None:
    units = "auto" if target.engine == "fsdp" else target.reading.value("units", "auto")
    named = asked.value == "units" and isinstance(units, list) and units
    target.set(asked, "strategy.activation_checkpointing", units if named else asked.value)


def _write_compile(target: Target, asked: Line) -> None:
    if target.engine == "deepspeed" and target.stage == 3 and asked.value:
        reason = "stage 3 gathers inside of the blocks, and a graph would end at every layer"
        target.lose(asked, reason, "--to shard_fsdp, or shard_deepspeed_stage_2", "speed")
    else:
        target.set(asked, "strategy.compile", asked.value)


def _write_accumulate_sync(target: Target, asked: Line) -> None:
    own = "boundary" if target.stage < 2 else "micro_batch"
    if target.engine == "deepspeed" and asked.value not in (own, AUTO):
        stages = "stage 1" if asked.value == "boundary" else "stages 2 and 3"
        target.lose(asked, f"stage {target.stage} reduces accumulated gradients by {own}", stages)
    else:
        target.set(asked, "strategy.accumulate_sync", asked.value)


def _write_accumulation(target: Target, asked: Line) -> None:
    note = "by engine, gradients are reduced by micro-batch or at the boundary, and round otherwise: accumulate_sync"
    target.set(asked, asked.name, asked.value, note * (asked.value != 1))


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
"""DeepSpeed's defaults. Its Adam decays weights as AdamW does."""
_ALSO = ("torch_adam", "adam_w_mode", "bias_correction")  # true: as torch's AdamW


def _write_optimizer(target: Target, asked: Line) -> None:
    """Write a DeepSpeed file's optimizer or scheduler. Other engines take Adam with numbers in the YAML."""
    key, kind = asked.name.partition(".")[2], str(asked.value.get("type")).lower()
    given = dict(asked.value.get("params") or {})
    plain = {name: value for name, value in given.items() if not (name in _ALSO and value is True)}
    where = "it comes from configure_optimizers, or `optimizer:` and `lr_scheduler:` in the YAML"
    if target.engine == "deepspeed":
        target.set(asked, f"strategy.{asked.name}", asked.value)
    elif AUTO in given.values() or (not given and key == "scheduler"):
        target.hold(asked, where)
    elif kind in ("adam", "adamw") and plain.keys() <= _ADAM.keys():
        target.top[key] = {"class_path": "torch.optim.AdamW", "init_args": {**_ADAM, **plain}}
        target.note(asked, key, "torch.optim.AdamW", "in the YAML, which LightningCLI gives to the module")
    else:
        target.lose(asked, where)


def _write_division(target: Target, asked: Line) -> None:
    """Write the order of dividing and summing gradients, which gives the same mean."""
    # DeepSpeed refuses another one for the reduce-scatter of stages 2 and 3.
    scatters = target.stage > 1 and target.arguments.get("buckets", {}).get("reduce_scatter") is not False
    if target.engine == "deepspeed" and not scatters:
        target.set(asked, f"strategy.{asked.name}", asked.value)
    else:
        target.hold(asked, "the mean is the same, but for its last digits")


_SPECIAL: Mapping[str, Callable[[Target, Line], None]] = {
    "engine": _write_engine,
    "shard": _write_shard,
    "mesh": _write_mesh,
    "reshard_ranks": _write_reshard_ranks,
    **dict.fromkeys(("cpu_offload", "offload_optimizer.device", "offload_parameters.device"), _write_offload),
    "activation_checkpointing": _write_activation_checkpointing,
    "compile": _write_compile,
    "accumulate_sync": _write_accumulate_sync,
    "trainer.accumulate_grad_batches": _write_accumulation,
    "precision": lambda target, asked: target.set(asked, "trainer.precision", asked.value),
    **dict.fromkeys(("reduce", "output", "loss_scale"), _write_override),
    **dict.fromkeys(("config.optimizer", "config.scheduler"), _write_optimizer),
    **dict.fromkeys(("config.prescale_gradients", "config.gradient_predivide_factor"), _write_division),
}
"""Settings whose counterpart depends on other settings."""


def write_precision(target: Target) -> None:
    """Replace the precision by `ShardPrecision` if that has more settings."""
    if overrides := target.trainer.pop("plugins", None):
        precision = target.trainer.pop("precision")
        if not target.reading.carried:
            # Over a YAML with a precision, this one has to unset it: Lightning takes one of the two.
            target.trainer["precision"] = None
        own = {"class_path": "lightning_shard.ShardPrecision", "init_args": {"precision": precision, **overrides}}
        kept = target.reading.carried.get("trainer", {}).get("plugins")
        others = kept if isinstance(kept, list) else [] if kept is None else [kept]
        target.trainer["plugins"] = [*others, own]
