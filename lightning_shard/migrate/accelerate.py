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
from lightning_shard.migrate.neutral import Field, Reading, described, shown

_UNSUPPORTED_SECTIONS = {
    "megatron_lm_config": "there is no Megatron-LM engine here",
    "fp8_config": "float8 is set by ShardPrecision('fp8-mixed', float8=...) in plugins, with torchao alone",
    "tp_config": "the mesh has no tensor-parallel axis",
    "mpirun_config": "mpirun is not started, but torchrun, srun or Lightning's own launcher",
    "ipex_config": "Intel's extension is not used",
}
_SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config", *_UNSUPPORTED_SECTIONS)

TOP, DEEPSPEED = described("accelerate"), described("accelerate_deepspeed")
PARALLELISM, DYNAMO = described("parallelism"), described("dynamo")

REFUSED_WITH_A_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
"""Keys that Accelerate refuses with ``deepspeed_config_file`` (``DeepSpeedPlugin._deepspeed_config_checks``)."""

DISTRIBUTED: Mapping[str, neutral.Engine] = {
    "NO": "ddp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "fsdp", "TP": "fsdp",
}  # fmt: skip
"""``distributed_type`` to the engine, or for the last two to the nearest one."""

OTHER_DEVICES = ("MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NEURON", "XLA")

PRECISIONS = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "bf16-mixed"}

_REDUCED = f"{CAST_NOTE}; gradients are reduced in fp32, by Accelerate's FSDP in 16 bits: ShardPrecision(reduce=...)"
NOTES: Mapping[neutral.Engine, str] = {"fsdp": _REDUCED, "deepspeed": PRECISION_NOTE, "ddp": CAST_NOTE}


def read_accelerate(reading: Reading, content: Mapping[str, Any], path: Path) -> None:
    """Read an Accelerate file. Its DeepSpeed file is in the working directory or in the folder of ``path``."""
    if content.get("distributed_type") is False:  # YAML 1.1 reads an unquoted NO as false
        content = {**content, "distributed_type": "NO"}
    reading.check_keys("", content, TOP, "an Accelerate config file")
    if str(content.get("compute_environment")).upper() == "AMAZON_SAGEMAKER":
        text = "compute_environment is AMAZON_SAGEMAKER, whose launcher does not start Lightning: give the file of a "
        reading.problems.append(f"{text}LOCAL_MACHINE")
        return
    engine = _read_engine(reading, content)
    _read_processes(reading, content, reading.read_fields("", TOP, content))
    given = {name: content.get(name) or {} for name in _SECTIONS}
    wrong = [name for name, section in given.items() if not isinstance(section, Mapping)]
    reading.problems += [f"{name} is {shown(given[name])!r}, but must be a mapping of keys" for name in wrong]
    sections = {name: {} if name in wrong else dict(section) for name, section in given.items()}
    _check_sections(reading, str(content.get("distributed_type", "NO")).upper(), sections)
    if engine == "fsdp" and sections["fsdp_config"]:
        read_fsdp(reading, sections["fsdp_config"])
        read_mesh(reading, sections["parallelism_config"], content.get("num_processes"))
    if engine == "deepspeed":
        _read_deepspeed_section(reading, sections["deepspeed_config"], content, path)
        read_mesh(reading, sections["parallelism_config"], content.get("num_processes"))
    _read_precision(reading, content)
    old = {"dynamo_backend": content["dynamo_backend"]} if "dynamo_backend" in content else {}
    _read_dynamo(reading, {**sections["dynamo_config"], **old})
    for name, reason in _UNSUPPORTED_SECTIONS.items():
        for key, value in sections[name].items():
            if value not in (None, False, {}, [], "none"):
                reading.lose(f"{name}.{key}", value, reason)


def _read_engine(reading: Reading, content: Mapping[str, Any]) -> neutral.Engine | None:
    given = content.get("distributed_type")
    kind = str(given).upper()
    if given is None:
        types = ", ".join(DISTRIBUTED)
        reading.problems.append(f"distributed_type is missing, but must be one of {types}, as Accelerate asks too")
    elif kind in OTHER_DEVICES:
        reading.problems.append(f"distributed_type is {given}, but the engines here run on CUDA devices and on CPUs")
    else:
        reading.engine = reading.read_field("distributed_type", Field(words=DISTRIBUTED), given)
    if kind in ("MEGATRON_LM", "TP"):
        reading.lose("distributed_type", given, "there is no such engine here", "shard_fsdp")
    elif reading.engine is not None:
        reading.ask("engine", reading.engine, "distributed_type", given)
    return reading.engine


def _read_processes(reading: Reading, content: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    machines, processes, on_cpu = read["num_machines"] or 1, read["num_processes"], read["use_cpu"]
    kind = str(content.get("distributed_type")).upper()
    if kind == "NO":
        if processes not in (None, 1):
            reading.meet("num_processes", processes, "with distributed_type NO Accelerate starts one process")
        processes = 1
    if on_cpu or kind == "MULTI_CPU":
        field = "use_cpu" if on_cpu else "distributed_type"
        reading.ask("trainer.accelerator", "cpu", field, content[field])
    else:
        reading.ask("trainer.accelerator", "gpu", "use_cpu", None, "unless a Lightning YAML says another")
    if "num_machines" in content:
        reading.ask("trainer.num_nodes", machines, "num_machines", machines)
    if processes in (None, -1):
        reading.ask("trainer.devices", "auto", "num_processes", processes, "as many as the node has")
        return
    if machines < 1 or processes < 1 or processes % machines != 0:
        reading.problems.append(
            f"num_processes is {processes} on num_machines {machines}, but each machine must have as many processes"
        )
        return
    local, given = processes // machines, content.get("gpu_ids")
    ids = [part.strip() for part in str(given).split(",")] if given not in (None, "all") else []
    if not ids:
        note = f"of each of the {machines} machines" if machines > 1 else ""
        reading.ask("trainer.devices", local, "num_processes", processes, note)
    elif not all(part.isdigit() for part in ids):
        reading.problems.append(f"gpu_ids is {given!r}, but must be all, or numbers with commas between them")
    elif len(ids) != local:
        reading.problems.append(
            f"gpu_ids is {given!r}, {len(ids)} devices, but num_processes asks for {local} processes on each machine"
        )
    else:
        reading.ask("trainer.devices", [int(part) for part in ids], "gpu_ids", given)


def _check_sections(reading: Reading, kind: str, sections: Mapping[str, dict[str, Any]]) -> None:
    owners = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
    for name, owner in owners.items():
        if sections[name] and kind == "NO":
            reading.meet(name, sections[name], "Accelerate does not read it with distributed_type NO either")
            sections[name].clear()
        elif sections[name] and kind != owner:
            reading.problems.append(
                f"{name} is given, but distributed_type is {kind}, so that Accelerate does not read it: remove the "
                f"section, or set distributed_type: {owner}"
            )
    given = sections["fsdp_config"]
    version = given.get("fsdp_version", given.get("version", 1))
    if sections["parallelism_config"] and kind != "DEEPSPEED" and (kind != "FSDP" or str(version) != "2"):
        reading.problems.append(
            f"parallelism_config is given with distributed_type {kind} and fsdp_version {version}, but Accelerate "
            "takes it with DEEPSPEED, and with FSDP and fsdp_version 2 alone"
        )


def _read_deepspeed_section(
    reading: Reading, section: Mapping[str, Any], content: Mapping[str, Any], path: Path
) -> None:
    reading.check_keys("deepspeed_config", section, DEEPSPEED, "deepspeed_config")
    file = section.get("deepspeed_config_file")
    if file in (None, "none"):
        reading.read_fields("deepspeed_config", DEEPSPEED, section)
        if section.get("zero_stage") is None:
            reading.ask("shard", "gradients", "deepspeed_config.zero_stage", None, "Accelerate's default is 2")
        return
    refused = {f"deepspeed_config.{name}": section.get(name) for name in REFUSED_WITH_A_FILE}
    refused["mixed_precision"] = content.get("mixed_precision")
    for name in [name for name, value in refused.items() if value is not None]:
        own = "bf16 or fp16" if name == "mixed_precision" else "it"
        fix = f"which Accelerate refuses: set {own} in the DeepSpeed file, and remove it here"
        reading.problems.append(f"{name} is {shown(refused[name])} with deepspeed_config_file, {fix}")
    others = {name: value for name, value in section.items() if name not in REFUSED_WITH_A_FILE}
    reading.read_fields("deepspeed_config", DEEPSPEED, others)
    found = next((p for p in (Path(str(file)), path.parent / str(file)) if p.is_file()), None)
    if found is None:
        reading.problems.append(f"deepspeed_config.deepspeed_config_file is {file!r}, but there is no such file")
        return
    reading.meet("deepspeed_config.deepspeed_config_file", file, "its content, below")
    read_deepspeed(reading, read_file(found), f"{found.name}: ")


def _read_precision(reading: Reading, content: Mapping[str, Any]) -> None:
    given, field = content.get("mixed_precision"), "mixed_precision"
    if given is None and content.get("fp16") is not None:
        field, given = "fp16", "fp16" if content["fp16"] in (True, "yes", "true") else "no"
    given = "no" if given is False else given  # YAML 1.1 reads an unquoted no as false
    precision = reading.read_field(field, Field(words=PRECISIONS), given)
    if precision is None:
        return
    if str(given).lower() == "fp8":
        reading.lose(field, given, _UNSUPPORTED_SECTIONS["fp8_config"], "precision: bf16-mixed")
    if reading.engine == "deepspeed" and precision == "16-mixed":
        reading.meet(field, given, SCALE_NOTE)
    note = "" if reading.engine is None else NOTES[reading.engine]
    loaded = "masters are fp32 also if the model was loaded in 16 bits, which Accelerate leaves so"
    reading.ask("precision", precision, field, given, note if precision != "32-true" else loaded)


def _read_dynamo(reading: Reading, section: Mapping[str, Any]) -> None:
    content = reading.prefixed("dynamo_config", section, "dynamo_", DYNAMO, {})
    backend = content.get("dynamo_backend")
    if (kind := str(backend or "NO").upper()) not in ("NO", "INDUCTOR"):
        reading.lose("dynamo_config.dynamo_backend", backend, "units are compiled by inductor alone", "compile: true")
        del content["dynamo_backend"]
    reading.read_fields("dynamo_config", DYNAMO, {"dynamo_backend": backend} if kind == "NO" else content)


def read_mesh(reading: Reading, section: Mapping[str, Any], processes: Any = None) -> None:
    """Read the mesh of a ``parallelism_config``, whose sizes multiply to ``processes``."""
    prefix = "parallelism_config_"
    plain = {str(key).removeprefix(prefix): value for key, value in section.items()}
    known = {key for name in PARALLELISM for key in (name, prefix + name)}
    reading.check_keys("parallelism_config", section, known, "parallelism_config")
    read = reading.read_fields("parallelism_config", PARALLELISM, plain)
    sizes: dict[str, int] = {name: v for name, v in read.items() if name.endswith("_size") and v is not None}
    if not sizes:
        return
    replicate, shard, product = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1), prod(sizes.values())
    if isinstance(processes, int) and processes > 0 and product != processes:
        factors = " x ".join(f"{name} {size}" for name, size in sizes.items())
        reading.problems.append(
            f"parallelism_config: {factors} is {product}, but num_processes is {processes}, but they must be equal"
        )
    given = {name: size for name, size in sizes.items() if name.startswith("dp_")}
    mesh = {"replicate": replicate, "shard": shard if product == replicate * shard else "auto"}
    reading.ask("mesh", mesh, "parallelism_config", given)
