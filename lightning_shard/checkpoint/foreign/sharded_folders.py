"""Reading directories of DeepSpeed ZeRO, stages 1 to 3, as DeepSpeed or stock Lightning writes them, and of stock FSDP.

ZeRO keeps flat fp32 partitions and unnamed slots, one list per rank. The place of each parameter follows from
``param_shapes``: stages 1 and 2 concatenate a group of parameters and cut it into one stretch per rank, stage 3 cuts
every parameter. Tensors are joined on request. DeepSpeed's ``zero_to_fp32.py``, the source of the arithmetic, can't be
called: it loads with ``weights_only=False`` and drops optimizer state.

Stock Lightning's FSDPStrategy and ModelParallelStrategy write torch.distributed.checkpoint files with the module under
``model`` (or ``state_dict``), each optimizer under ``optimizer_<i>`` with parameters by name, and ``meta.pt``.
"""

import enum
import importlib.metadata
import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.archive import ArchivedTensor, materialize, read_archive
from lightning_shard.checkpoint.files.boxes import StorageInfo, parse_foreign_metadata
from lightning_shard.checkpoint.files.layout import Directory, open_directory
from lightning_shard.checkpoint.files.manifest import Contents, Facts, StoredTensor
from lightning_shard.checkpoint.files.tensor_files import read_full
from lightning_shard.checkpoint.files.trainer_state import load_archive, refusal
from lightning_shard.checkpoint.foreign.lightning_file import described_optimizer, is_extra
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from lightning_shard.tensors.names import without_wrappers

_MODEL, _OPTIM = "_model_states.pt", "_optim_states.pt"


class _Inert:
    """Stand-in for objects of DeepSpeed that are not read."""

    def __new__(cls, *_: Any) -> "_Inert":
        return super().__new__(cls)


class _ZeroStage(enum.IntEnum):
    """Stand-in for DeepSpeed's enumeration, with its names."""

    disabled, optimizer_states, gradients, weights, max_stage = 0, 1, 2, 3, 3


def _member(kind: type, name: str) -> _ZeroStage:
    """Stand-in for getattr, by which Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""
    return _ZeroStage[name]


# Classes that the files name, and their stand-ins. DeepSpeed itself is neither imported nor run.
_ALLOWED = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": _ZeroStage,
    "builtins.getattr": _member,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": _Inert,
}

# Entries of DeepSpeed's engine, among the user's own (``DeepSpeedEngine._save_checkpoint``).
_OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "shared_params", "frozen_param_shapes"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts"),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "autoep_layers", "universal_checkpoint_info"),
}


def deepspeed_folder(path: Path) -> Path | None:
    """Find the folder with the ranks' files: ``path``, the one that its ``latest`` names, or Lightning's subfolder."""
    if (path / "latest").is_file():
        return path / layout.check_relative((path / "latest").read_text(encoding="utf-8", errors="replace").strip())
    folders = (path, path / "checkpoint")
    return next((folder for folder in folders if folder.is_dir() and any(folder.glob(f"*{_MODEL}"))), None)


def open_deepspeed(path: layout.StrPath) -> Contents:
    """Open the checkpoint in the directory ``path``. No tensor is read yet. CheckpointCorruptError: a file that is
    damaged or names another class. CheckpointError: model and expert parallelism, stage 0, elastic checkpoints.
    """
    folder = deepspeed_folder(Path(path))
    assert folder is not None
    models = [read_archive(file, _ALLOWED) for file in _files(folder, _MODEL)]
    states = [read_archive(file, _ALLOWED) for file in _files(folder, _OPTIM)]
    with layout.damaged_if(f"{folder} is no ZeRO checkpoint"):
        return _stored(folder, models, [state["optimizer_state_dict"] for state in states])


def _files(folder: Path, suffix: str) -> list[Path]:
    found = sorted(folder.glob(f"*{suffix}"), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)])
    others = [file.name for file in found if "mp_rank_00" not in file.name or "expert" in file.name]
    if others or any(folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder} was written with model, pipeline or expert parallelism; only ZeRO data parallelism is read"
        )
    if not found:
        raise CheckpointError(
            f"{folder} has no file *{suffix}: it is not complete, or was saved with ZeRO stage 0 and so has no "
            "partitions. Of such a run save a Lightning .ckpt file."
        )
    return found


def _stored(folder: Path, models: list[dict[str, Any]], states: list[dict[str, Any]]) -> Contents:
    first, world = states[0], len(states)
    counts = first["partition_count"]
    if world != (max(counts) if isinstance(counts, list) else counts):
        raise CheckpointError(f"{folder} has the files of {world} ranks, but {counts} wrote it: copy all of them")
    stage = first.get("zero_stage", 1)
    base_key, flat_key = "base_optimizer_state", "single_partition_of_fp32_groups"
    if stage == 3:
        base_key, flat_key = "optimizer_state_dict", "fp32_flat_groups"
    if not isinstance(first[base_key], dict):
        raise CheckpointError(f"{folder} is an elastic checkpoint of ZeRO; save it with elastic_checkpoint: false")
    places = _places(models[0]["param_shapes"], first.get("param_alignment_paddings"), world if stage == 3 else 0)
    flats = [state[flat_key] for state in states]
    weights = {_clean(n): _flat_tensor([flat[p.group] for flat in flats], p, stage) for n, p in places.items()}
    described, slots = _optimizer([state[base_key] for state in states], places, stage)
    shared = dict(models[0].get("shared_params") or {})
    rest, extra = _rest_of_module(models, stage, {*places, *shared})
    weights |= rest
    engine = f"DeepSpeed ZeRO-{stage}"
    versions = {"deepspeed": str(models[0].get("ds_version", "unknown"))}
    return Contents.of(
        form=engine,
        facts=Facts(engine=engine, policy="not recorded", world_size=world, versions=versions),
        weights=weights,
        # Stage 3 saves no values of parameters that no optimizer steps.
        aliases={_clean(alias): _clean(name) for alias, name in shared.items() if _clean(name) in weights},
        slots=slots,
        trainer_state=_trainer_state(models[0])
        | {layout.EXTRA_STATE: materialize(extra), layout.OPTIMIZER_STATES: [described]},
    )


def _rest_of_module(
    models: Sequence[Mapping[str, Any]], stage: int, known: Collection[str]
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return frozen parameters and buffers by FQN, and extra state by name."""
    tensors: dict[str, StoredTensor] = {}
    extra: dict[str, Any] = {}
    frozen = dict(models[0].get("frozen_param_shapes") or {}) if stage == 3 else {}
    for name, value in models[0]["module"].items():
        fqn = _clean(name)
        if name in known:
            continue
        if name in frozen:
            # Each rank has an equal share, padded at the end.
            fragments = [model["frozen_param_fragments"][name] for model in models]
            tensors[fqn] = _joined([(part, 0, part.shape[0]) for part in fragments], tuple(frozen[name]))
        elif is_extra(name, value):
            extra[fqn] = value
        elif stage < 3 or value.shape != (0,) or name in models[0]["buffer_names"]:
            tensors[fqn] = value
        # Otherwise it is trainable but in no optimizer. Stage 3 saves no values of it.
    return tensors, extra


def _trainer_state(model: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of the user or Lightning, and those that Lightning needs to resume."""
    state: dict[str, Any] = materialize({key: value for key, value in model.items() if key not in _OWN})
    schedule = materialize(model.get("lr_scheduler"))
    state.setdefault("lr_schedulers", [schedule] if isinstance(schedule, dict) and "last_epoch" in schedule else [])
    state.setdefault("epoch", 0)
    state.setdefault("global_step", model.get("global_steps", 0))
    # The present version, so that Lightning migrates nothing.
    state.setdefault("pytorch-lightning_version", importlib.metadata.version("lightning"))
    return state


def _clean(name: str) -> str:
    """Remove the prefix of Lightning's wrapper before 2.0."""
    return name.removeprefix("_forward_module.").removeprefix("module.")


def _optimizer(
    bases: Sequence[Mapping[str, Any]], places: "Mapping[str, _Place]", stage: int
) -> tuple[dict[str, Any], dict[layout.SlotName, StoredTensor]]:
    """Return the groups' description and the slots' tensors. A state has the number of its flat group."""
    numbers = [number for group in bases[0]["param_groups"] for number in group["params"]]
    inside: dict[int, list[str]] = {}
    for name, place in places.items():
        inside.setdefault(numbers[place.group], []).append(name)
    groups, state = [], dict[str, dict[str, Any]]()
    for group in bases[0]["param_groups"]:
        names = [name for number in group["params"] for name in inside.get(number, [])]
        # Some optimizers count steps by group.
        step = {"step": group["step"]} if group.get("step") is not None else {}
        groups.append({**{k: v for k, v in group.items() if k != "step"}, "params": names})
        for name in names:
            states = [base["state"].get(numbers[places[name].group], {}) for base in bases]
            state[name] = {**step, **states[0]}
            for slot, value in state[name].items():
                if slot == "step":
                    state[name][slot] = _scalar(value)
                elif isinstance(value, ArchivedTensor) and len(value.shape) == 1:
                    state[name][slot] = _flat_tensor([own[slot] for own in states], places[name], stage)
    slots = dict[layout.SlotName, StoredTensor]()
    clean = [_clean(name) for group in groups for name in group["params"]]
    return described_optimizer(0, {"state": state, "param_groups": groups}, clean, "unknown", slots), slots


def _scalar(value: Any) -> StoredTensor:
    number = float(value.read() if isinstance(value, StoredTensor) else value)
    return StoredTensor(shape=(), dtype=torch.float32, read=lambda: torch.tensor(number, dtype=torch.float32))


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The place of a parameter: ``group`` in the flat lists, and ``offset`` there."""

    group: int
    offset: int
    shape: tuple[int, ...]


def _places(shapes: Sequence[Mapping[str, Any]], paddings: Any, world: int) -> dict[str, _Place]:
    """Name to place. ``world``: number of ranks that divide every parameter (stage 3), 0 in other stages."""
    found: dict[str, _Place] = {}
    for group, named in enumerate(shapes):
        offset = 0
        for position, (name, size) in enumerate(named.items()):
            shape = tuple(size)
            found[name] = _Place(group=group, offset=offset, shape=shape)
            numel = torch.Size(shape).numel()
            offset += -(-numel // world) if world else numel
            if paddings is not None and not world:
                offset += paddings[group][position]
    return found


def _flat_tensor(parts: Sequence[ArchivedTensor], place: _Place, stage: int) -> StoredTensor:
    """Return the parameter, or slot, at ``place``. ``parts``: each rank's flat tensor of the group."""
    numel = torch.Size(place.shape).numel()
    if stage == 3:
        share = -(-numel // len(parts))
        ranges = [(part, place.offset, place.offset + share) for part in parts]
    else:
        # All ranks' stretches are as long as rank 0's, except that padding at the group's end is not stored.
        size, end = parts[0].shape[0], place.offset + numel
        ranges = [
            (part, max(place.offset - rank * size, 0), min(end - rank * size, size))
            for rank, part in enumerate(parts)
            if place.offset < (rank + 1) * size and end > rank * size
        ]
    return _joined(ranges, place.shape)


def _joined(ranges: Sequence[tuple[ArchivedTensor, int, int]], shape: tuple[int, ...]) -> StoredTensor:
    """Concatenate 1-D ``ranges`` (tensor, first, last), cut to the elements of ``shape``."""
    numel = torch.Size(shape).numel()
    if sum(last - first for _, first, last in ranges) < numel or any(last > t.shape[0] for t, _, last in ranges):
        raise CheckpointCorruptError(f"the ranks' partitions are too short for a parameter of shape {shape}")
    dtype = ranges[0][0].dtype if ranges else torch.float32

    def read() -> Tensor:
        full = torch.empty(numel, dtype=dtype)
        filled = 0
        for tensor, first, last in ranges:
            count = min(last - first, numel - filled)
            full[filled : filled + count] = tensor.mapped[first : first + count]
            filled += count
        return full.view(shape)

    return StoredTensor(shape=shape, dtype=dtype, read=read)


REST = "meta.pt"
_TOPS = ("model", "state_dict")
_OPTIMIZER = "optimizer_"
_FORM = "stock Lightning FSDP"


def is_stock_fsdp(path: Path) -> bool:
    return (path / REST).is_file() and (path / layout.METADATA).is_file()


def open_stock_fsdp(path: layout.StrPath) -> Contents:
    """Open the directory ``path``. No tensor is read yet. CheckpointCorruptError: damaged, or names another class."""
    with layout.damaged_if(f"{path} is no directory of Lightning's FSDPStrategy"):
        return _stored_in(Path(path), open_directory(path))


def _stored_in(path: Path, directory: Directory) -> Contents:
    state = materialize(read_archive(path / REST))
    sizes = {name: size for name, size in directory.sizes().items() if name.endswith(layout.DATA_SUFFIX)}
    files = {name: layout.FileEntry(size=size, sha256="") for name, size in sizes.items()}
    with directory.open(layout.METADATA) as stream:
        tensors, items, paths = parse_foreign_metadata(stream.read(), files, directory.path / layout.METADATA)
    if not isinstance(state, dict) or any(not _is_known(parts) for parts in paths.values()):
        raise CheckpointError(f"{path} has other contents than Lightning's FSDPStrategy saves; it is not supported")
    tree: dict[Any, Any] = {}
    for key, parts in paths.items():
        if key in items:
            value = _item(directory, key, items[key])
        else:
            read = partial(read_full, directory, tensors, key)
            value = StoredTensor(shape=tensors[key].shape, dtype=tensors[key].dtype, read=read)
            if parts[1] == "state":  # a slot, perhaps of the tensors inside a tensor subclass
                parts = (*parts[:3], ".".join(map(str, parts[3:])))
        place = tree
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    module = {without_wrappers(str(name)): v for top in _TOPS for name, v in tree.pop(top, {}).items()}
    weights = {name: value for name, value in module.items() if not is_extra(name, value)}
    extra = materialize({name: value for name, value in module.items() if name not in weights})
    slots: dict[layout.SlotName, StoredTensor] = {}
    optimizers = []
    by_number = sorted(tree.items(), key=lambda item: int(item[0].removeprefix(_OPTIMIZER)))
    for index, (_, state_dict) in enumerate(by_number):
        groups = [group for _, group in sorted(state_dict["param_groups"].items())]
        names = [without_wrappers(name) for group in groups for name in group["params"]]
        by_name = {"state": state_dict.get("state", {}), "param_groups": groups}
        optimizers.append(described_optimizer(index, by_name, names, "unknown", slots))
    state |= {layout.EXTRA_STATE: extra, **({layout.OPTIMIZER_STATES: optimizers} if optimizers else {})}
    facts = Facts(
        engine=_FORM,
        policy="not recorded",
        world_size=len({name.split("_")[2] for name in files if name.startswith("__")}) or 1,
        versions={"lightning": str(state.get("pytorch-lightning_version", "unknown"))},
    )
    return Contents.of(form=_FORM, facts=facts, weights=weights, aliases={}, slots=slots, trainer_state=state)


def _is_known(parts: tuple[str | int, ...]) -> bool:
    top = str(parts[0])
    if top in _TOPS:
        return len(parts) > 1
    return top.removeprefix(_OPTIMIZER).isdigit() and len(parts) >= 4 and parts[1] in ("state", "param_groups")


def _item(directory: Directory, key: str, place: StorageInfo) -> Any:
    where = directory.path / place.relative_path
    with directory.open(place.relative_path) as stream:
        stream.seek(place.offset)
        data = io.BytesIO(stream.read(place.length))
    with layout.damaged_if(lambda error: f"{key}: {refusal(where, error)}"):
        return load_archive(data, where)
