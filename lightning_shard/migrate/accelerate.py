"""Read Accelerate config files into neutral settings.

The rules come from ``accelerate/commands/config`` and ``commands/launch.py`` of Accelerate 1.15, with the spellings
of older files.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from lightning_shard.engines.zero.config.reading import read_file
from lightning_shard.migrate import neutral
from lightning_shard.migrate.deepspeed_json import CAST_NOTE, PRECISION_NOTE, SCALE_NOTE, read_deepspeed
from lightning_shard.migrate.fsdp_config import read_fsdp
from lightning_shard.migrate.neutral import Field, Reading, described, plain, shown

_UNSUPPORTED_SECTIONS = {
    "megatron_lm_config": "there is no Megatron-LM engine here",
    "fp8_config": "float8 is set by ShardPrecision('fp8-mixed', float8=...) in plugins, with torchao alone",
    "tp_config": "the mesh has no tensor-parallel axis",
    "mpirun_config": "mpirun is not started, but torchrun, srun or Lightning's own launcher",
    "ipex_config": "Intel's extension is not used",
}
_OWNERS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}

TOP, DEEPSPEED = described("accelerate"), described("accelerate_deepspeed")
PARALLELISM, DYNAMO = described("parallelism"), described("dynamo")

DISTRIBUTED: Mapping[Any, neutral.Engine] = {
    "NO": "ddp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "fsdp", "TP": "fsdp",
}  # fmt: skip
"""``distributed_type`` to the engine, or for the last two to the nearest one."""

PRECISIONS = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "bf16-mixed"}

_REDUCED = f"{CAST_NOTE}; gradients are reduced in fp32, by Accelerate's FSDP in 16 bits: ShardPrecision(reduce=...)"
NOTES: Mapping[neutral.Engine, str] = {"fsdp": _REDUCED, "deepspeed": PRECISION_NOTE, "ddp": CAST_NOTE}


def read_accelerate(reading: Reading, content: Mapping[str, Any], path: Path) -> None:
    """Read an Accelerate file. Its DeepSpeed file is in the working directory or in the folder of ``path``."""
    # YAML 1.1 reads an unquoted NO or no as false.
    words = {key: "NO" for key in ("distributed_type", "mixed_precision") if content.get(key) is False}
    content = {**content, **words}
    reading.check_keys("", content, TOP, "an Accelerate config file")
    if content.get("distributed_type") is None:
        reading.problems.append(f"distributed_type is missing, but must be one of {', '.join(DISTRIBUTED)}")
    kind = str(content.get("distributed_type", "NO")).upper()
    engine = reading.engine = reading.read_field("distributed_type", Field(words=DISTRIBUTED), kind)
    if kind in ("MEGATRON_LM", "TP"):
        reading.lose("distributed_type", kind, "there is no such engine here", "shard_fsdp")
    elif engine is not None:
        reading.ask("engine", engine, "distributed_type", kind)
    reading.read_fields("", TOP, content)
    _read_processes(reading, content, kind)
    sections = _sections(reading, content, kind)
    if engine == "fsdp" and sections["fsdp_config"]:
        read_fsdp(reading, sections["fsdp_config"])
    if engine == "deepspeed":
        _read_deepspeed_section(reading, sections["deepspeed_config"], path)
    read_mesh(reading, sections["parallelism_config"], content.get("num_processes"))
    _read_precision(reading, content)
    old = {"dynamo_backend": content["dynamo_backend"]} if "dynamo_backend" in content else {}
    _read_dynamo(reading, {**sections["dynamo_config"], **old})
    for name, reason in _UNSUPPORTED_SECTIONS.items():
        for key, value in sections[name].items():
            if value not in (None, False, {}, [], "none"):
                reading.lose(f"{name}.{key}", value, reason)


def _read_processes(reading: Reading, content: Mapping[str, Any], kind: str) -> None:
    machines, processes = (plain(content.get(name)) for name in ("num_machines", "num_processes"))
    machines, ids = machines or 1, content.get("gpu_ids")
    if kind == "NO" and processes not in (None, 1):
        reading.meet("num_processes", processes, "with distributed_type NO Accelerate starts one process")
        processes = 1
    if kind == "MULTI_CPU" or plain(content.get("use_cpu")) is True:
        field = "distributed_type" if kind == "MULTI_CPU" else "use_cpu"
        reading.ask("trainer.accelerator", "cpu", field, content[field])
    else:
        reading.ask("trainer.accelerator", "gpu", "use_cpu", None, "unless a Lightning YAML says another")
    if "num_machines" in content:
        reading.ask("trainer.num_nodes", machines, "num_machines", machines)
    if processes in (None, -1):
        reading.ask("trainer.devices", "auto", "num_processes", processes, "as many as the node has")
    elif not (isinstance(processes, int) and isinstance(machines, int) and machines > 0 and processes > 0):
        reading.problems.append(f"num_processes is {processes} on num_machines {machines}, but both must be numbers")
    elif processes % machines:
        reading.problems.append(
            f"num_processes is {processes} on num_machines {machines}, but each machine must have as many processes"
        )
    elif ids in (None, "all"):
        reading.ask("trainer.devices", processes // machines, "num_processes", processes, "of each machine")
    else:
        numbers = [part.strip() for part in str(ids).split(",")]
        if len(numbers) != processes // machines or not all(map(str.isdigit, numbers)):
            many = processes // machines
            reading.problems.append(f"gpu_ids is {ids!r}, but must be all, or {many} numbers with commas between them")
        else:
            reading.ask("trainer.devices", [int(number) for number in numbers], "gpu_ids", ids)


def _sections(reading: Reading, content: Mapping[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Return each section, and note those that Accelerate does not read with this ``distributed_type``."""
    found: dict[str, dict[str, Any]] = {}
    for name in {*_OWNERS, "parallelism_config", "dynamo_config", *_UNSUPPORTED_SECTIONS}:
        section = content.get(name) or {}
        if not isinstance(section, Mapping):
            reading.problems.append(f"{name} is {shown(section)!r}, but must be a mapping of keys")
            section = {}
        elif section and name in _OWNERS and kind == "NO":
            reading.meet(name, section, "Accelerate does not read it with distributed_type NO either")
            section = {}
        elif section and kind != _OWNERS.get(name, kind):
            fix = f"remove the section, or set distributed_type: {_OWNERS[name]}"
            reading.problems.append(f"{name} is given, but with {kind} Accelerate does not read it: {fix}")
        found[name] = dict(section)
    return found


def _read_deepspeed_section(reading: Reading, section: Mapping[str, Any], path: Path) -> None:
    reading.check_keys("deepspeed_config", section, DEEPSPEED, "deepspeed_config")
    reading.read_fields("deepspeed_config", DEEPSPEED, section)
    file = section.get("deepspeed_config_file")
    if file in (None, "none"):
        if section.get("zero_stage") is None:
            reading.ask("shard", "gradients", "deepspeed_config.zero_stage", None, "Accelerate's default is 2")
        return
    found = next((p for p in (Path(str(file)), path.parent / str(file)) if p.is_file()), None)
    if found is None:
        reading.problems.append(f"deepspeed_config.deepspeed_config_file is {file!r}, but there is no such file")
        return
    reading.meet("deepspeed_config.deepspeed_config_file", file, "its content, below")
    read_deepspeed(reading, read_file(found), f"{found.name}: ")


def _read_precision(reading: Reading, content: Mapping[str, Any]) -> None:
    given, field = content.get("mixed_precision"), "mixed_precision"
    if given is None and content.get("fp16") is not None:
        field, given = "fp16", "fp16" if plain(content["fp16"]) is True else "no"
    precision = reading.read_field(field, Field(words=PRECISIONS), given)
    if precision is None:
        return
    if str(given).lower() == "fp8":
        reading.lose(field, given, _UNSUPPORTED_SECTIONS["fp8_config"], "precision: bf16-mixed")
    if reading.engine == "deepspeed" and precision == "16-mixed":
        reading.meet(field, given, SCALE_NOTE)
    note = NOTES[reading.engine or "ddp"]
    loaded = "masters are fp32 also if the model was loaded in 16 bits, which Accelerate leaves so"
    reading.ask("precision", precision, field, given, note if precision != "32-true" else loaded)


def _read_dynamo(reading: Reading, section: Mapping[str, Any]) -> None:
    content = reading.prefixed("dynamo_config", section, "dynamo_", DYNAMO)
    backend = str(content.get("dynamo_backend") or "NO")
    if backend.upper() not in ("NO", "INDUCTOR"):
        reading.lose("dynamo_config.dynamo_backend", backend, "units are compiled by inductor alone", "compile: true")
    read = content if backend.upper() == "INDUCTOR" else {}
    reading.read_fields("dynamo_config", DYNAMO, read)


def read_mesh(reading: Reading, section: Mapping[str, Any], processes: Any = None) -> None:
    """Read the mesh of a ``parallelism_config``, whose sizes multiply to ``processes``."""
    content = {str(key).removeprefix("parallelism_config_"): plain(value) for key, value in section.items()}
    reading.check_keys("parallelism_config", content, PARALLELISM, "parallelism_config")
    reading.read_fields("parallelism_config", PARALLELISM, content)
    sizes = {name: value for name, value in content.items() if name.endswith("_size") and isinstance(value, int)}
    if not sizes:
        return
    replicate, shard, product = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1), prod(sizes.values())
    if isinstance(processes, int) and processes > 0 and product != processes:
        reading.problems.append(
            f"parallelism_config: the sizes {shown(sizes)} multiply to {product}, but num_processes is {processes}"
        )
    given = {name: size for name, size in sizes.items() if name.startswith("dp_")}
    mesh = {"replicate": replicate, "shard": shard if product == replicate * shard else "auto"}
    reading.ask("mesh", mesh, "parallelism_config", given)
