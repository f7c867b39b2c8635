"""Opening a checkpoint runs nothing in it and notices every change."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from lightning_shard.checkpoint.files.layout import FileEntry
from lightning_shard.checkpoint.files.manifest import FORMAT_VERSION, Facts, is_checkpoint, read_manifest
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from tests.checkpoint.calls import load_into, save_tensors, trainer_state
from tests.checkpoint.hostile import RAN, Hostile

INFO = Facts(engine="test", policy="fp32", ledger={"model.w": "float32"})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.ckpt"
    save_tensors(path, fresh(1.0), trainer_state={"epoch": 1, "t": torch.ones(2)}, facts=INFO)
    return path


def fresh(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((4, 3), value), "model.b": torch.full((3,), value)}


def forge(path: Path, name: str, data: bytes, **changes: Any) -> None:
    """Replace a file and make the manifest agree, as whoever can write the directory may.

    ``.metadata`` is what checkpoints of format 1 are read by.
    """
    if name == ".metadata":
        changes["format_version"] = 1
    (path / name).write_bytes(data)
    manifest = read_manifest(path)
    entry = FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest = dataclasses.replace(manifest, files={**manifest.files, name: entry}, **changes)
    (path / "manifest.json").write_text(manifest.to_json())


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the fields of the manifest, and have its digest fit."""
    fields = change(json.loads((path / "manifest.json").read_text()))
    if isinstance(fields, dict):
        fields.pop("digest", None)
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        fields["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(fields))


def metadata_of(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())


def refused(path: Path, pattern: str, **kwargs: Any) -> None:
    tensors = fresh()
    with pytest.raises(CheckpointCorruptError, match=pattern):
        load_into(path, tensors, **kwargs)
    assert all(tensor.eq(0).all() for tensor in tensors.values())


# Metadata, then BUILD with a slot state that sets an attribute on the class: plain pickle does it.
EVIL = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x06marked\x8c\x04evil\x73tb."


def test_the_hostile_pickles_would_run():
    pickle.loads(pickle.dumps(Hostile()))
    assert RAN == ["ran"]
    RAN.clear()
    pickle.loads(EVIL)
    assert Metadata.marked == "evil"
    del Metadata.marked


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (pickle.dumps(Hostile()), "it names tests.checkpoint.hostile.ran"),
        (b"cposix\nsystem\n(S'true'\ntR.", "it names posix.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "it names builtins.eval"),
        (b"\x80\x04\x8c\x05torch\x8c\x08hub.load\x93.", "it names torch.hub.load"),
        (pickle.dumps(BytesStorageMetadata()), "BytesStorageMetadata"),
        (b"Psomething\n.", "it refers to an object outside of itself"),
        (EVIL, ""),
        *((data, "") for data in (b"", b"\x80\x04", b"not a pickle", b"\x80\x04N.")),
    ],
)
def test_hostile_metadata_is_refused(path, payload, said):
    before = dict(vars(Metadata))
    forge(path, ".metadata", payload)
    refused(path, rf"a\.ckpt/\.metadata.*{re.escape(said)}")
    assert dict(vars(Metadata)) == before


def location(metadata: Metadata, **changes: Any) -> None:
    index, info = next((i, info) for i, info in metadata.storage_data.items() if i.fqn == "model.w")
    fields = {"relative_path": info.relative_path, "offset": info.offset, "length": info.length} | changes
    metadata.storage_data[index] = _StorageInfo(**fields)


def box(metadata: Metadata, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    metadata.state_dict_metadata["model.w"].chunks[0] = chunk


def drop_location(metadata: Metadata) -> None:
    metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != "model.w"}


def move(metadata: Metadata, offsets: tuple[int, ...]) -> None:
    """A box and what is stored for it at another place."""
    box(metadata, offsets, (4, 3))
    stored = {i.fqn: info for i, info in metadata.storage_data.items()}
    metadata.storage_data = {
        MetadataIndex("model.w", offsets): stored["model.w"],
        MetadataIndex("model.b", (0,)): stored["model.b"],
    }


CHANGES: list[tuple[Callable[[Metadata], Any], str]] = [
    (lambda m: location(m, relative_path="../secret"), r"'\.\./secret' is not a plain relative path"),
    (lambda m: location(m, relative_path="/etc/passwd"), "'/etc/passwd' is not a plain relative path"),
    (lambda m: location(m, relative_path="other.distcp"), "points at 'other.distcp', which the manifest"),
    (lambda m: location(m, offset=10**9), "points outside of __0_0.distcp"),
    (lambda m: location(m, length=-5), "points outside of __0_0.distcp"),
    (lambda m: location(m, transform_descriptors=["zstd"]), "asks for a stream transform"),
    (drop_location, r"model\.w has a part at \(0, 0\) that no file holds"),
    (lambda m: box(m, (0, 0), (5, 3)), "is outside of its shape"),
    (lambda m: box(m, (0, 0), (3, 3)), r"do not make up its shape \(4, 3\)"),
    (lambda m: move(m, (-1, 0)), r"\(-1, 0\) is no shape"),
    (lambda m: m.state_dict_metadata.pop("model.b"), "describe other tensors: model.b"),
    (lambda m: setattr(m.state_dict_metadata["model.b"].properties, "dtype", torch.int8), "other tensors: model.b"),
]


def test_metadata_that_describes_something_else(path):
    original = (path / ".metadata").read_bytes()
    for change, said in CHANGES:
        metadata = pickle.loads(original)
        change(metadata)
        forge(path, ".metadata", pickle.dumps(metadata))
        refused(path, rf"\.metadata: .*{said}")


def forge_tensor(path, value):
    """Have the data file hold ``value`` in the place of the tensor."""
    with open(path / "evil", "wb") as stream:
        torch.save(value, stream)
    data = (path / "evil").read_bytes()
    metadata = metadata_of(path)
    location(metadata, relative_path="__0_0.distcp", offset=0, length=len(data))
    forge(path, "__0_0.distcp", data + bytes(10**5))
    forge(path, ".metadata", pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"x": Hostile()}, r"__0_0\.distcp: model\.w can't be read: .*"),
        (torch.ones(100, 100), r"model\.w is not a torch\.float32 tensor of shape \(4, 3\)"),
    ],
    ids=["hostile", "of another shape"],
)
def test_a_hostile_data_file(path, value, said):
    forge_tensor(path, value)
    with pytest.raises(CheckpointCorruptError, match=said):
        load_into(path, {"model.w": torch.zeros(4, 3)}, strict=False)


def test_hostile_trainer_state(path):
    torch.save({"x": Hostile()}, path / "evil")
    forge(path, "trainer.pt", (path / "evil").read_bytes())
    with pytest.raises(CheckpointCorruptError, match=r"trainer\.pt names .*\.ran, .*nothing in it ran"):
        trainer_state(path)


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\\b", "a\0b", "./a"])
def test_file_names_that_leave_the_directory(path, name):
    manifest = read_manifest(path)
    entry = FileEntry(size=0, sha256="")
    forged = dataclasses.replace(manifest, files={**manifest.files, name: entry})
    (path / "manifest.json").write_text(forged.to_json())
    assert not is_checkpoint(path)
    refused(path, r"manifest\.json: file name .* is not a plain relative path")


def test_a_manifest_that_was_edited(path):
    fields = json.loads((path / "manifest.json").read_text())
    fields["engine"] = "other"
    (path / "manifest.json").write_text(json.dumps(fields))
    assert not is_checkpoint(path)
    refused(path, "digest does not match")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"format": 1}', "[" * 10**5, '{"format": "lightning_shard.checkpoint"}']
)
def test_a_manifest_that_is_none(path, text):
    (path / "manifest.json").write_text(text)
    assert not is_checkpoint(path)
    refused(path, "manifest.json is not a checkpoint's manifest")


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 5])
def test_other_forms_are_refused_by_their_version(path, version):
    other = dataclasses.replace(read_manifest(path), format_version=version)
    (path / "manifest.json").write_text(other.to_json())
    with pytest.raises(CheckpointError, match=f"version {version}; this .* reads 1 and {FORMAT_VERSION}: "):
        load_into(path, fresh())


def test_fields_of_later_minor_versions_are_ignored(path):
    rewrite(path, lambda fields: {**fields, "note": "new"})
    assert read_manifest(path).facts.engine == "test"
