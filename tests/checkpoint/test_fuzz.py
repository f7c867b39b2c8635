"""Checkpoints with changed manifests, metadata, states and files, through every reader.

Each is read, or refused in a sentence, at once and in the memory of a small file.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

from lightning_shard.checkpoint.files.boxes import DecodedBoxes, encode_boxes
from lightning_shard.checkpoint.files.manifest import FORMAT_VERSION, _digest, read_manifest
from lightning_shard.checkpoint.foreign.hugging_face_folders import export
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.inspect import describe, open_any, verify
from lightning_shard.checkpoint.load import open_checkpoint, open_newest, with_own_states
from lightning_shard.checkpoint.save import write_portable
from lightning_shard.errors import CheckpointError
from tests.checkpoint.calls import FACTS, load_module, save_module
from tests.checkpoint.nets import build, step

MOST_BYTES = 300 << 20
BIG = [2**31, 2**33, 2**62, 2**63, 2**70]
TEXTS = ["", "x", "../x", "/etc/hostname", "a\0b", "model.x", "x" * 10_000, "float32", "nn", "bytearray"]
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
VALUES = [None, True, -1, 0, 1, *BIG, -(2**63), 1.5, float("nan"), float("inf"), *TEXTS, [], {}, [[]], {"a": {}}, DEEP]


OWN = {"rng": {"torch": torch.ones(3)}, "metrics": {}, "loaders": [{"at": (5, 6)}]}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    net, optimizer = build("plain", 0)
    step(net, optimizer)
    facts = type(FACTS)(engine="e", policy="p", run={"name": "mine", "step": 1, "time": 0.0})
    state = {"epoch": 3, "global_step": 2, "loops": {"fit_loop": {"state_dict": {"combined_loader": [{"at": (5, 6)}]}}}}
    state["lightning_shard"] = {"seed": 1}
    save_module(folder / "a.ckpt", module=net, optimizers=[optimizer], trainer_state=state, own_state=OWN, facts=facts)
    write_full(folder / "b.ckpt", open_any(folder / "a.ckpt"))
    return folder


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a tree of dictionaries, lists and tuples, itself included."""
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The same with another value there; `places`."""
    if not path:
        return value
    key, *rest = path
    made = dict(tree) if isinstance(tree, dict) else list(tree)
    made[key] = changed(tree[key], tuple(rest), value)
    return made if isinstance(tree, dict | list) else tuple(made)


def mutated(draw: Callable[..., Any], tree: Any, others: list[Any]) -> Any:
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(tree))))
        tree = changed(tree, path, copy.deepcopy(draw(st.sampled_from(others))))
    return tree


def mangled(draw: Callable[..., Any], data: bytes) -> bytes:
    """Bytes changed, put in, repeated or left out."""
    at = draw(st.integers(0, len(data) - 1))
    count = draw(st.sampled_from([0, 1, 1, 4, 1000]))
    # Opcodes of pickles, each with an argument that is too large.
    new = draw(
        st.sampled_from([b"", b"\x85" * 300, b"2\x86" * 40, b"0", b"r\xff\xff\xff\x0f", b"\x8d" + b"\xff" * 8, b"h\0"])
    )
    return data[:at] + (new or draw(st.binary(max_size=8))) + data[at + count :]


def zipped(data: bytes, change: Callable[[bytes], bytes], method: int) -> bytes:
    """A file of torch.save whose pickle is another one."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w", method) as new:
        for info in old.infolist():
            new.writestr(
                info.filename, change(old.read(info)) if info.filename.endswith("data.pkl") else old.read(info)
            )
    return made.getvalue()


def attributes(value: Any) -> Any:
    """The records of torch's metadata as a tree for `changed`; `records` makes them of it again."""
    if isinstance(value, dict):
        return {"dict": [[attributes(key), attributes(part)] for key, part in value.items()]}
    if isinstance(value, list) or type(value) is tuple:
        return [attributes(part) for part in value]
    if hasattr(value, "__dict__"):
        return {"class": type(value), "state": {k: attributes(v) for k, v in vars(value).items()}}
    return value


def records(value: Any) -> Any:
    if isinstance(value, list):
        return [records(part) for part in value]
    if isinstance(value, dict) and set(value) == {"dict"} and isinstance(value["dict"], list):
        return {
            key if isinstance(key := records(k), str) or hasattr(key, "fqn") else str(key): records(v)
            for k, v in value["dict"]
        }
    if isinstance(value, dict) and isinstance(value.get("class"), type) and isinstance(value.get("state"), dict):
        made = object.__new__(value["class"])
        for name, part in value["state"].items():
            object.__setattr__(made, name, records(part))
        return made
    return value


def signed(path: Path, version: int = FORMAT_VERSION) -> None:
    """Make the manifest agree with the files, as who can write the directory may."""
    fields = json.loads((path / "manifest.json").read_text())
    fields.pop("digest")
    fields["format_version"] = version
    for name, entry in fields["files"].items():
        data = (path / name).read_bytes()
        entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (path / "manifest.json").write_text(json.dumps({**fields, "digest": _digest(fields)}))


def ends_with(file: Path, own: bytes, off: int) -> None:
    """Put the state of a rank at a file's end, with a length that is ``off``."""
    data = file.read_bytes()
    boxes = data[: -8 - int.from_bytes(data[-8:], "little")]
    file.write_bytes(boxes + own + (len(own) + off).to_bytes(8, "little"))


def change(draw: Callable[..., Any], folder: Path) -> None:
    """Change one of the files."""
    path = folder / "a.ckpt"
    kind = draw(
        st.sampled_from(["manifest", "metadata", "boxes", "state", "own", "bytes", "pickle", "one file", "special"])
    )
    if kind == "manifest":
        fields = mutated(draw, json.loads((path / "manifest.json").read_text()), VALUES)
        if isinstance(fields, dict):
            fields.pop("digest", None)
            text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
            fields["digest"] = hashlib.sha256(text.encode()).hexdigest()
        (path / "manifest.json").write_text(json.dumps(fields))
    elif kind == "metadata":
        tree = attributes(pickle.loads((path / ".metadata").read_bytes()))
        (path / ".metadata").write_bytes(pickle.dumps(records(mutated(draw, tree, VALUES))))
        signed(path, version=1)
    elif kind == "boxes":
        found = DecodedBoxes((path / "boxes.bin").read_bytes(), read_manifest(path))
        tables = [found[key].rows.copy() for key in sorted(found)]
        for _ in range(draw(st.integers(1, 3))):
            numbers = draw(st.sampled_from(tables)).reshape(-1)
            at = draw(st.integers(0, len(numbers) - 1))
            numbers[at] = draw(st.sampled_from([-1, 0, 1, 7, numbers[at] ^ 1, *BIG[:3], -(2**63), 2**63 - 1]))
        (path / "boxes.bin").write_bytes(encode_boxes(tables))
        signed(path)
    elif kind in ("state", "own"):
        others = [value for value in VALUES if value is not DEEP] + [torch.ones(1).expand(2**40), torch.ones(2, 2)]
        if kind == "state":
            torch.save(mutated(draw, torch.load(path / "trainer.pt", weights_only=True), others), path / "trainer.pt")
        else:
            torch.save(mutated(draw, OWN, others), made := io.BytesIO())
            ends_with(path / "__0_0.distcp", made.getvalue(), draw(st.sampled_from([0, 0, 0, -1, 1, *BIG[:3]])))
        signed(path)
    elif kind == "bytes":
        file = path / draw(st.sampled_from(sorted(entry.name for entry in path.iterdir())))
        file.write_bytes(mangled(draw, file.read_bytes()))
        if file.name != "manifest.json":
            signed(path, version=1 if file.name == ".metadata" else FORMAT_VERSION)
    elif kind in ("pickle", "one file"):
        file = path / "trainer.pt" if kind == "pickle" else folder / "b.ckpt"
        method = draw(st.sampled_from([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED]))
        file.write_bytes(zipped(file.read_bytes(), lambda data: mangled(draw, data), method))
        signed(path)
    else:
        file = path / draw(st.sampled_from(sorted(entry.name for entry in path.iterdir())))
        file.unlink()
        make = draw(st.sampled_from([os.mkfifo, os.mkdir, lambda f: os.symlink("/dev/zero", f), lambda f: None]))
        make(file)


def read_by_all(folder: Path) -> list[str]:
    """What of `folder` could be read; anything but a sentence of refusal is raised."""
    path, done, lengths = folder / "a.ckpt", list[str](), [0]
    readers: dict[str, Callable[[], Any]] = {
        "load": lambda: load(path),
        "resume": lambda: with_own_states(open_checkpoint(path)),
        "inspect": lambda: describe(path, open_any(path)),
        "verify": lambda: verify(path),
        "export": lambda: export(open_any(path), folder / "exported"),
        "convert": lambda: write_full(folder / "c.ckpt", open_any(path)),
        "auto": lambda: open_newest([folder], "mine"),
        "one file": lambda: write_portable(folder / "d.ckpt", open_any(folder / "b.ckpt")),
        "verify one file": lambda: verify(folder / "b.ckpt"),
    }
    for name, read in readers.items():
        started = time.process_time()
        try:
            read()
            done.append(name)
        except CheckpointError as error:
            lengths.append(len(str(error)))
        assert time.process_time() - started < 1, name
    assert max(lengths) < 3000
    return done


def load(path: Path) -> None:
    net, optimizer = build("plain", 0)
    load_module(path, module=net, optimizers=[optimizer])


def fuzz(good: Path, folder: Path, examples: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    unhurried = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}

    @settings(max_examples=examples, phases=[Phase.generate], **unhurried)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        try:
            change(data.draw, folder)
        except (TypeError, ValueError, AttributeError, RuntimeError, RecursionError):
            reject()  # it can't be written
        read_by_all(folder)

    run()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < MOST_BYTES


def test_what_is_not_changed_is_read_by_all(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "a")
    assert len(read_by_all(tmp_path / "a")) == 9


def test_changed_checkpoints(good: Path, tmp_path: Path) -> None:
    fuzz(good, tmp_path / "a", 25)


def test_a_tensor_of_a_rank_that_repeats_its_values_is_refused(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "a")
    path = tmp_path / "a" / "a.ckpt"
    torch.save({**OWN, "rng": torch.ones(1).expand(2**40)}, made := io.BytesIO())
    ends_with(path / "__0_0.distcp", made.getvalue(), 0)
    signed(path)
    with pytest.raises(CheckpointError, match="a tensor of many more"):
        with_own_states(open_checkpoint(path))


@pytest.mark.soak
def test_many_changed_checkpoints(good: Path, tmp_path: Path) -> None:
    fuzz(good, tmp_path / "a", 10_000)
