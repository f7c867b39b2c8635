"""Reading the sharded directory of stock Lightning's FSDPStrategy and ModelParallelStrategy.

torch.distributed.checkpoint files with the module under ``model`` (or ``state_dict``), each optimizer under
``optimizer_<i>`` with parameters by name, and ``meta.pt`` with the rest of Lightning's checkpoint.
"""

import io
from functools import partial
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.archive import materialize, read_archive
from lightning_shard.checkpoint.files.boxes import StorageInfo, parse_foreign_metadata
from lightning_shard.checkpoint.files.contents import Contents, StoredTensor
from lightning_shard.checkpoint.files.directory import Directory, open_directory
from lightning_shard.checkpoint.files.manifest import Facts
from lightning_shard.checkpoint.files.tensor_files import read_full
from lightning_shard.checkpoint.files.trainer_state import load_archive, refusal
from lightning_shard.checkpoint.foreign.lightning_file import described_optimizer
from lightning_shard.errors import CheckpointError
from lightning_shard.tensors.names import without_wrappers

REST = "meta.pt"
_MODEL = ("model", "state_dict")
_OPTIMIZER = "optimizer_"
_FORM = "stock Lightning FSDP"


def is_stock_fsdp(path: Path) -> bool:
    return (path / REST).is_file() and (path / layout.METADATA).is_file()


def open_stock_fsdp(path: layout.StrPath) -> Contents:
    """The directory ``path``; no tensor of the model or an optimizer is read yet.

    Raises CheckpointCorruptError for a file that names a class which such checkpoints do not need, or is damaged.
    """
    with layout.damaged_if(f"{path} is no directory of Lightning's FSDPStrategy"):
        return _stored_in(Path(path), open_directory(path))


def _stored_in(path: Path, directory: Directory) -> Contents:
    state = materialize(read_archive(path / REST))
    sizes = {name: size for name, size in directory.sizes().items() if name.endswith(layout.DATA_SUFFIX)}
    files = {name: layout.FileEntry(size=size, sha256="") for name, size in sizes.items()}
    with directory.open(layout.METADATA) as stream:
        metadata = parse_foreign_metadata(stream.read(), files, directory.path / layout.METADATA)
    if not isinstance(state, dict) or any(not _is_known(parts) for parts in metadata.paths.values()):
        raise CheckpointError(f"{path} has other contents than Lightning's FSDPStrategy saves; it is not supported")
    tree: dict[Any, Any] = {}
    for key, parts in metadata.paths.items():
        if key in metadata.items:
            value = _item(directory, key, metadata.items[key])
        else:
            boxes, read = metadata.tensors[key], partial(read_full, directory, metadata.tensors, key)
            value = StoredTensor(shape=boxes.shape, dtype=boxes.dtype, read=read)
            if parts[1] == "state":  # of an optimizer, whose slot may be a tensor of a class of its own
                parts = (*parts[:3], ".".join(map(str, parts[3:])))
        place = tree
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    module = {without_wrappers(str(name)): v for top in _MODEL for name, v in tree.pop(top, {}).items()}
    weights = {name: value for name, value in module.items() if isinstance(value, StoredTensor)}
    extra = materialize({name: value for name, value in module.items() if name not in weights})
    slots: dict[layout.SlotName, StoredTensor] = {}
    optimizers = []
    for index, (_, state_dict) in enumerate(
        sorted(tree.items(), key=lambda item: int(item[0].removeprefix(_OPTIMIZER)))
    ):
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
    if top in _MODEL:
        return len(parts) > 1
    return top.removeprefix(_OPTIMIZER).isdigit() and len(parts) >= 4 and parts[1] in ("state", "param_groups")


def _item(directory: Directory, key: str, place: StorageInfo) -> Any:
    where = directory.path / place.relative_path
    with directory.open(place.relative_path) as stream:
        stream.seek(place.offset)
        data = io.BytesIO(stream.read(place.length))
    with layout.damaged_if(lambda error: f"{key}: {refusal(where, error)}"):
        return load_archive(data, where)
