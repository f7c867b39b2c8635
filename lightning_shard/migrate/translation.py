"""From the neutral form to one engine: by the table of counterparts, and by rules for what depends on others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning_shard.migrate import dependent_settings
from lightning_shard.migrate.counterparts import Holds, Same, find
from lightning_shard.migrate.neutral import Asked, Engine, Reading, shown
from lightning_shard.migrate.target import Target


def build(reading: Reading, engine: Engine, preset: Mapping[str, Any] | None) -> Target:
    """What a reading is on one engine.

    Args:
        reading: of all sources.
        engine: to be written for.
        preset: arguments of the strategy name that the user gave; they hold whatever the sources ask for. None: the
            source's own engine, with all its settings.
    """
    # One by one: two groups of a preset may be one and the same mapping.
    arguments = {name: copy.deepcopy(value) for name, value in (preset or {}).items()}
    target = Target(engine=engine, arguments=arguments, told=preset is not None, reading=reading)
    for asked in _once(reading, target.problems):
        if asked.name in dependent_settings.SPECIAL:
            dependent_settings.SPECIAL[asked.name](target, asked)
        else:
            _by_table(target, asked)
    dependent_settings.finish(target)
    target.rows += reading.met
    target.lost += reading.lost
    return target


def _once(reading: Reading, problems: list[str]) -> list[Asked]:
    """The settings in the order in which the engine needs them; one of those that are asked for twice.

    A default gives way to what a file says.
    """
    kept: dict[tuple[str, str], Asked] = {}
    said: dict[str, Asked] = {}
    for asked in reading.asked:
        before = said.get(asked.name)
        if before is not None and before.value != asked.value and None not in (before.given, asked.given):
            problems.append(
                f"{before.field} is {shown(before.given)}, but {asked.field} is {shown(asked.given)}: make them equal, "
                "or remove one"
            )
        if asked.given is not None or before is None:
            said[asked.name] = asked
    for asked in reading.asked:
        if said[asked.name].value == asked.value:
            kept[asked.name, asked.field] = asked
    return sorted(kept.values(), key=lambda asked: _FIRST.index(asked.name) if asked.name in _FIRST else len(_FIRST))


_FIRST = (
    "engine",
    "shard",
    "mesh",
    "reshard_ranks",
    "precision",
    "aligned",
    "units",
    "cpu_offload",
    "offload_optimizer.device",
    "offload_parameters.device",
)
"""Settings on which others depend."""


def _by_table(target: Target, asked: Asked) -> None:
    if asked.name in _ONLY_FP32 and target.engine == "ddp" and _compute(target) != "32-true":
        target.lose(
            asked,
            "only torch's DistributedDataParallel has it, for 32-true; other precisions run on FSDP2's replicate",
            "precision: 32-true",
        )
        return
    answer = find(asked.name).answer(target.engine, asked.value)
    group = asked.name.partition(".")[0]
    if asked.name in _GATHERING and target.engine == "deepspeed" and target.stage < 3:
        target.hold(asked, f"parameters are not sharded in stage {target.stage}, so that there is nothing to gather")
    elif isinstance(answer, Holds):
        target.hold(asked, answer.note)
    elif not isinstance(answer, Same):
        target.lose(asked, answer.reason, answer.nearest)
    elif asked.name.startswith("trainer."):
        target.set(asked, asked.name, asked.value)
    elif group.startswith("offload_") and group not in target.arguments:
        target.hold(asked, "nothing is offloaded")
    elif asked.name.endswith(".nvme_path") and target.arguments[group].get("device") != "nvme":
        target.hold(asked, "nothing is kept in files")
    elif group.startswith("stage3") and target.engine == "deepspeed" and target.stage < 3:
        target.hold(asked, "DeepSpeed reads it in stage 3 alone")
    elif _DEFAULTS.get(asked.name) == asked.value:
        target.default(asked, f"strategy.{asked.name}")
    else:
        target.set(asked, f"strategy.{answer.path or asked.name}", asked.value)


_ONLY_FP32 = (
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "bucket_cap_mb",
    "comm_hook",
    "comm_state",
)
"""Options of torch's DistributedDataParallel, which `ShardDDPStrategy` refuses in 16 bits."""


_DEFAULTS = {"units": "auto", "timeout_seconds": 1800.0, "start_method": "popen"}
_GATHERING = ("units", "forward_prefetch", "backward_prefetch")


def _compute(target: Target) -> str:
    return str(target.reading.value("precision", "32-true"))
