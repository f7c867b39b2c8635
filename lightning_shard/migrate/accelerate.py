"""Accelerate config files, read into the neutral form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lightning_shard.migrate import accelerate_fields as tables
from lightning_shard.migrate.accelerate_fsdp import read_fsdp, read_mesh, with_prefix
from lightning_shard.migrate.deepspeed_json import PRECISION_NOTE, SCALE_NOTE, read_deepspeed
from lightning_shard.migrate.fields import Field, check_keys, nearest, read_field, read_fields
from lightning_shard.migrate.files import read_file
from lightning_shard.migrate.neutral import Engine, Reading, shown

_REDUCED = (
    "modules cast their parameters and inputs, autocast is not used; gradients are reduced in fp32, by Accelerate's "
    "FSDP in 16 bits: ShardPrecision(reduce=...)"
)


def read_accelerate(reading: Reading, content: Mapping[str, Any], path: Path) -> None:
    """Add to ``reading`` what an Accelerate config file asks for.

    Args:
        reading: problems, such as unknown keys and contradictions, are added to it too.
        content: of the file.
        path: of the file; a ``deepspeed_config_file`` is looked for from the current folder, then beside it.
    """
    check_keys(reading, "", content, tables.TOP, "an Accelerate config file")
    if str(content.get("compute_environment", "LOCAL_MACHINE")).upper() == "AMAZON_SAGEMAKER":
        reading.problems.append(
            "compute_environment is AMAZON_SAGEMAKER, whose launcher does not start Lightning; give the file of a "
            "LOCAL_MACHINE"
        )
        return
    engine = _engine(reading, content)
    read_fields(reading, "", tables.TOP, content)
    _processes(reading, content)
    _launch(reading, content)
    sections = {name: _section(reading, content, name) for name in _SECTIONS}
    _check_sections(reading, str(content.get("distributed_type", "NO")).upper(), sections)
    if engine == "fsdp" and sections["fsdp_config"]:
        read_fsdp(reading, sections["fsdp_config"])
        read_mesh(reading, sections["parallelism_config"], content)
    if engine == "deepspeed":
        _deepspeed(reading, sections["deepspeed_config"], content, path)
    _precision(reading, content)
    _dynamo(reading, {**sections["dynamo_config"], **_old_dynamo(content)})
    for name, reason in _UNSUPPORTED_SECTIONS.items():
        for key, value in sections[name].items():
            if value not in (None, False, {}, [], "none"):
                reading.lose(f"{name}.{key}", value, reason)


_UNSUPPORTED_SECTIONS = {
    "megatron_lm_config": "there is no Megatron-LM engine here",
    "fp8_config": "no engine here computes in fp8",
    "tp_config": "the mesh has no tensor-parallel axis",
    "mpirun_config": "mpirun is not started; the launcher is torchrun, srun or Lightning's own",
    "ipex_config": "Intel's extension is not used",
}


_SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config", *_UNSUPPORTED_SECTIONS)


def _section(reading: Reading, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        reading.problems.append(f"{name} is {shown(section)!r}, but must be a mapping of keys")
        return {}
    return dict(section)


def _engine(reading: Reading, content: Mapping[str, Any]) -> Engine | None:
    given = content.get("distributed_type")
    kind = str(given).upper()
    if given is None:
        reading.problems.append(
            f"distributed_type is missing, but must be one of {', '.join(tables.DISTRIBUTED)}, as Accelerate asks too"
        )
        return None
    if kind in tables.OTHER_DEVICES:
        reading.problems.append(f"distributed_type is {given}, but the engines here run on CUDA devices and on CPUs")
        return None
    if kind not in tables.DISTRIBUTED:
        known = [*tables.DISTRIBUTED, *tables.OTHER_DEVICES]
        reading.problems.append(f"distributed_type is {given!r}, which Accelerate does not have{nearest(kind, known)}")
        return None
    engine = cast(Engine, tables.DISTRIBUTED[kind])
    reading.engine = engine
    if kind in ("MEGATRON_LM", "TP"):
        reading.lose("distributed_type", given, "there is no such engine here", "shard_fsdp")
    else:
        reading.ask("engine", engine, "distributed_type", given)
    return engine


def _processes(reading: Reading, content: Mapping[str, Any]) -> None:
    machines = read_field(reading, "num_machines", Field(kind="int"), content.get("num_machines")) or 1
    processes = read_field(reading, "num_processes", Field(kind="int"), content.get("num_processes"))
    on_cpu = read_field(reading, "use_cpu", Field(kind="bool"), content.get("use_cpu"))
    if str(content.get("distributed_type")).upper() == "NO" and processes is None:
        processes = 1
    if on_cpu or str(content.get("distributed_type")).upper() == "MULTI_CPU":
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
    _devices(reading, content.get("gpu_ids"), processes, processes // machines)


def _devices(reading: Reading, given: Any, processes: int, local: int) -> None:
    ids = [part.strip() for part in str(given).split(",")] if given not in (None, "all") else []
    if not ids:
        note = f"of each of the {processes // local} machines" if processes != local else ""
        reading.ask("trainer.devices", local, "num_processes", processes, note)
    elif not all(part.isdigit() for part in ids):
        reading.problems.append(f"gpu_ids is {given!r}, but must be all, or numbers with commas between them")
    elif len(ids) != local:
        reading.problems.append(
            f"gpu_ids is {given!r}, {len(ids)} devices, but num_processes asks for {local} processes on each machine"
        )
    else:
        reading.ask("trainer.devices", [int(part) for part in ids], "gpu_ids", given)


def _launch(reading: Reading, content: Mapping[str, Any]) -> None:
    names = {"main_process_ip": "MASTER_ADDR", "main_process_port": "MASTER_PORT", "machine_rank": "NODE_RANK"}
    several = isinstance(content.get("num_machines"), int) and content["num_machines"] > 1
    for field, variable in names.items():
        value = content.get(field)
        if value is None or (field == "machine_rank" and not several):
            if value is not None:
                reading.rest(field, value)
            continue
        reading.launch[variable] = str(value)
        reading.meet(field, value, f"the environment's: {variable}={value}; srun and torchrun set it themselves")


def _check_sections(reading: Reading, kind: str, sections: Mapping[str, dict[str, Any]]) -> None:
    owners = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
    for name, owner in owners.items():
        if sections[name] and kind != owner:
            reading.problems.append(
                f"{name} is given, but distributed_type is {kind}, so that Accelerate does not read it: remove the "
                f"section, or set distributed_type: {owner}"
            )
    version = with_prefix(sections["fsdp_config"]).get("fsdp_version", 1)
    if sections["parallelism_config"] and (kind != "FSDP" or str(version) != "2"):
        reading.problems.append(
            f"parallelism_config is given with distributed_type {kind} and fsdp_version {version}, but Accelerate "
            "takes it with FSDP and fsdp_version 2 alone"
        )


# DeepSpeed


def _deepspeed(reading: Reading, section: Mapping[str, Any], content: Mapping[str, Any], path: Path) -> None:
    check_keys(reading, "deepspeed_config", section, tables.DEEPSPEED, "deepspeed_config")
    file = section.get("deepspeed_config_file")
    if file in (None, "none"):
        read_fields(reading, "deepspeed_config", tables.DEEPSPEED, section)
        if section.get("zero_stage") is None:
            reading.ask("shard", "gradients", "deepspeed_config.zero_stage", None, "Accelerate's default is 2")
        return
    refused = {name: section[name] for name in tables.REFUSED_BESIDE_A_FILE if section.get(name) is not None}
    reading.problems += [
        f"deepspeed_config.{name} is {shown(value)} beside deepspeed_config_file, where Accelerate refuses it: set it "
        "in the DeepSpeed file, and remove it here"
        for name, value in refused.items()
    ]
    others = {name: value for name, value in section.items() if name not in tables.REFUSED_BESIDE_A_FILE}
    read_fields(reading, "deepspeed_config", tables.DEEPSPEED, others)
    if content.get("mixed_precision") is not None:
        reading.problems.append(
            f"mixed_precision is {content['mixed_precision']} beside deepspeed_config_file, where Accelerate refuses "
            "it: set bf16 or fp16 in the DeepSpeed file, and remove it here"
        )
    found = next((p for p in (Path(str(file)), path.parent / str(file)) if p.is_file()), None)
    if found is None:
        reading.problems.append(f"deepspeed_config.deepspeed_config_file is {file!r}, but there is no such file")
        return
    reading.meet("deepspeed_config.deepspeed_config_file", file, "its content, below")
    read_deepspeed(reading, read_file(found), f"{found.name}: ")


# Precision and compilation


def _precision(reading: Reading, content: Mapping[str, Any]) -> None:
    given = content.get("mixed_precision")
    field = "mixed_precision"
    if given is None and content.get("fp16") is not None:
        field, given = "fp16", content["fp16"]
        given = "fp16" if given in (True, "yes", "true") else "no"
    if given is None:
        return
    if isinstance(given, bool):  # YAML 1.1 reads an unquoted no as false
        given = "no" if not given else "true"
    kind = str(given).upper()
    if kind == "FP8":
        reading.lose(field, given, "no engine here computes in fp8", "precision: bf16-mixed")
        reading.ask("precision", "bf16-mixed", field, given)
    elif kind not in tables.PRECISIONS:
        near = nearest(kind.lower(), [*map(str.lower, tables.PRECISIONS), "fp8"])
        reading.problems.append(f"{field} is {given!r}, but must be one of no, fp16, bf16, fp8{near}")
    else:
        engine = reading.engine
        if engine == "deepspeed" and kind == "FP16":
            reading.meet(field, given, SCALE_NOTE)
        note = {"fsdp": _REDUCED, "deepspeed": PRECISION_NOTE, "ddp": _DDP_NOTE}.get(str(engine), "")
        reading.ask("precision", tables.PRECISIONS[kind], field, given, note if kind != "NO" else "")


_DDP_NOTE = "modules cast their parameters and inputs, autocast is not used"


def _old_dynamo(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"dynamo_backend": content["dynamo_backend"]} if "dynamo_backend" in content else {}


def _dynamo(reading: Reading, section: Mapping[str, Any]) -> None:
    content = {key if str(key).startswith("dynamo_") else f"dynamo_{key}": value for key, value in section.items()}
    known = {key for name in tables.DYNAMO for key in (name, name.removeprefix("dynamo_"))}
    check_keys(reading, "dynamo_config", section, known, "dynamo_config")
    backend = str(content.get("dynamo_backend") or "NO").upper()
    for name, described in tables.DYNAMO.items():
        value = content.get(name)
        if name == "dynamo_backend" and backend in tables.OTHER_BACKENDS:
            reading.lose(f"dynamo_config.{name}", value, "units are compiled by inductor alone", "compile: true")
        elif backend != "NO" or name == "dynamo_backend":
            read_field(reading, f"dynamo_config.{name}", described, value)
