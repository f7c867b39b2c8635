"""Reading directories of DeepSpeed ZeRO, stages 1 to 3, as DeepSpeed or stock Lightning writes them, and of stock FSDP.

ZeRO keeps flat fp32 partitions and unnamed slots, one list per rank. The place of each parameter follows from
``param_shapes``: stages 1 and 2 concatenate a group of parameters and cut it into one stretch per rank, stage 3 cuts
every parameter. Tensors are joined on request. DeepSpeed's ``zero_to_fp32.py``, the source of the arithmetic, can't be
called: it loads with ``weights_only=False`` and drops optimizer state.

Stock Lightning's FSDPStrategy and ModelParallelStrategy write torch.distributed.checkpoint files with the module under
``model`` (or ``state_dict``), each optimizer under ``optimizer_<i>`` with parameters by name, and ``meta.pt``.
"""

import importlib.metadata
import io
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.archive import read_archive
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


# Classes that the files name, and their stand-ins. DeepSpeed itself is neither imported nor run.
_ALLOWED = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
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
    if others or not found or any(folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder} has {others[0] if others else f'no file *{suffix}'}, and only whole checkpoints of ZeRO-1, -2 "
            "and -3 without model, pipeline and expert parallelism are read. Of other runs save a Lightning .ckpt file."
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
    weights = {name: _flat_tensor([flat[p.group] for flat in flats], p, stage) for name, p in places.items()}
    described, slots = _optimizer([state[base_key] for state in states], places, stage)
    aliases = dict(models[0].get("shared_params") or {})
    rest, extra = _rest_of_module(models, stage, {*places, *aliases})
    weights |= rest
    own = {layout.EXTRA_STATE: extra, layout.OPTIMIZER_STATES: [described]}
    engine = f"DeepSpeed ZeRO-{stage}"
    versions = {"deepspeed": str(models[0].get("ds_version", "unknown"))}
    return Contents.of(
        form=engine,
        facts=Facts(engine=engine, policy="not recorded", world_size=world, versions=versions),
        weights=weights,
        # Stage 3 saves no values of parameters that no optimizer steps.
        aliases={alias: name for alias, name in aliases.items() if name in weights},
        slots=slots,
        trainer_state=_trainer_state(models[0]) | own,
    )


def _rest_of_module(
    models: Sequence[Mapping[str, Any]], stage: int, known: Collection[str]
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return frozen parameters and buffers by FQN, and extra state by name."""
    tensors: dict[str, StoredTensor] = {}
    extra: dict[str, Any] = {}
    frozen = dict(models[0].get("frozen_param_shapes") or {}) if stage == 3 else {}
    for name, value in models[0]["module"].items():
        if name in known:
            continue
        if name in frozen:
            # Each rank has an equal share, padded at the end.
            fragments = [model["frozen_param_fragments"][name] for model in models]
            tensors[name] = _joined([(part, 0, part.shape[0]) for part in fragments], tuple(frozen[name]))
        elif is_extra(name, value):
            extra[name] = value
        elif stage < 3 or value.shape != (0,) or name in models[0]["buffer_names"]:
            tensors[name] = StoredTensor.of(value)
        # Otherwise it is trainable but in no optimizer. Stage 3 saves no values of it.
    return tensors, extra


def _trainer_state(model: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of the user or Lightning, and those that Lightning needs to resume."""
    state = {key: value for key, value in model.items() if key not in _OWN}
    schedule = model.get("lr_scheduler")
    state.setdefault("lr_schedulers", [schedule] if isinstance(schedule, dict) and "last_epoch" in schedule else [])
    state.setdefault("epoch", 0)
    state.setdefault("global_step", model.get("global_steps", 0))
    # The present version, so that Lightning migrates nothing.
    state.setdefault("pytorch-lightning_version", importlib.metadata.version("lightning"))
    return state


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
                    state[name][slot] = torch.tensor(float(value), dtype=torch.float32)
                elif isinstance(value, Tensor) and value.ndim == 1:
                    state[name][slot] = _flat_tensor([own[slot] for own in states], places[name], stage)
    slots = dict[layout.SlotName, StoredTensor]()
    stepped = [name for group in groups for name in group["params"]]
    return described_optimizer(0, {"state": state, "param_groups": groups}, stepped, "unknown", slots), slots


class _Place(NamedTuple):
    group: int  # of the flat lists
    offset: int  # in it
    shape: tuple[int, ...]


def _places(shapes: Sequence[Mapping[str, Any]], paddings: Any, world: int) -> dict[str, _Place]:
    """Name to place. ``world``: number of ranks that divide every parameter (stage 3), 0 in other stages."""
    found: dict[str, _Place] = {}
    for group, named in enumerate(shapes):
        offset = 0
        for position, (name, size) in enumerate(named.items()):
            shape = tuple(size)
            found[name] = _Place(group, offset, shape)
            numel = torch.Size(shape).numel()
            offset += -(-numel // world) if world else numel
            if paddings is not None and not world:
                offset += paddings[group][position]
    return found


def _flat_tensor(parts: Sequence[Tensor], place: _Place, stage: int) -> StoredTensor:
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


def _joined(ranges: Sequence[tuple[Tensor, int, int]], shape: tuple[int, ...]) -> StoredTensor:
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
            full[filled : filled + count] = tensor[first : first + count]
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
    state = read_archive(path / REST)
    sizes = {name: size for name, size in directory.sizes().items() if name.endswith(layout.DATA_SUFFIX)}
    files = {name: layout.FileEntry(size=size, sha256="") for name, size in sizes.items()}
    with directory.open(layout.METADATA) as stream:
        tensors, items, paths = parse_foreign_metadata(stream.read(), files, directory.path / layout.METADATA)
    module: dict[str, Any] = {}
    optimizers: dict[int, dict[str, dict[Any, dict[str, Any]]]] = {}
    for key, (top, *parts) in paths.items():
        if key in items:
            value = _item(directory, key, items[key])
        elif key.endswith("_extra_state") or parts[0] == "param_groups":
            value = read_full(directory, tensors, key)
        else:
            read = partial(read_full, directory, tensors, key)
            value = StoredTensor(shape=tensors[key].shape, dtype=tensors[key].dtype, read=read)
        if top in _TOPS:
            module[without_wrappers(str(parts[0]))] = value
            continue
        # The rest of a path names a slot, perhaps of the tensors inside a tensor subclass.
        kind, of, *name = parts
        optimizer = optimizers.setdefault(int(str(top).removeprefix(_OPTIMIZER)), {"state": {}, "param_groups": {}})
        optimizer[str(kind)].setdefault(of, {})[".".join(map(str, name))] = value
    weights = {name: value for name, value in module.items() if not is_extra(name, value)}
    slots: dict[layout.SlotName, StoredTensor] = {}
    described = []
    for index, (_, saved) in enumerate(sorted(optimizers.items())):
        groups = [group for _, group in sorted(saved["param_groups"].items())]
        names = [without_wrappers(name) for group in groups for name in group["params"]]
        by_name = {"state": saved["state"], "param_groups": groups}
        described.append(described_optimizer(index, by_name, names, "unknown", slots))
    state[layout.EXTRA_STATE] = {name: value for name, value in module.items() if name not in weights}
    state |= {layout.OPTIMIZER_STATES: described} if described else {}
    facts = Facts(
        engine=_FORM,
        policy="not recorded",
        world_size=len({name.split("_")[2] for name in files if name.startswith("__")}) or 1,
        versions={"lightning": str(state.get("pytorch-lightning_version", "unknown"))},
    )
    return Contents.of(form=_FORM, facts=facts, weights=weights, aliases={}, slots=slots, trainer_state=state)


def _item(directory: Directory, key: str, place: StorageInfo) -> Any:
    where = directory.path / place.relative_path
    with directory.open(place.relative_path) as stream:
        stream.seek(place.offset)
        data = io.BytesIO(stream.read(place.length))
    with layout.damaged_if(lambda error: f"{key}: {refusal(where, error)}"):
        return load_archive(data, where)
