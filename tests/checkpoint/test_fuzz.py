"""Checkpoints with changed manifests, boxes, states and files, through every reader.

Each is read, or refused in a sentence, at once and in the memory of a small file.
"""

from __future__ import annotations

import copy
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

from lightning_shard.checkpoint.files.boxes import DecodedBoxes, encode_boxes
from lightning_shard.checkpoint.files.manifest import read_manifest
from lightning_shard.checkpoint.foreign.hugging_face_folders import export
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.inspect import describe, open_any, verify
from lightning_shard.checkpoint.load import open_checkpoint, open_newest, with_own_states
from lightning_shard.checkpoint.save import write_portable
from lightning_shard.errors import CheckpointError
from tests.checkpoint.calls import FACTS, load_module, save_module
from tests.checkpoint.nets import build, step
from tests.checkpoint.test_safety import forge, rewrite

MOST_BYTES = 300 << 20
BIG = [2**31, 2**33, 2**62, 2**63, 2**70]
TEXTS = ["", "x", "../x", "/etc/hostname", "a\0b", "model.x", "x" * 10_000, "float32", "nn", "bytearray"]
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
VALUES = [None, True, -1, 0, 1, *BIG, -(2**63), 1.5, float("nan"), float("inf"), *TEXTS, [], {}, [[]], {"a": {}}]
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
    return data[:at] + draw(st.binary(max_size=8)) + data[at + count :]


def ends_with(file: Path, own: bytes) -> None:
    """Put the state of a rank at a file's end."""
    data = file.read_bytes()
    boxes = data[: -8 - int.from_bytes(data[-8:], "little")]
    forge(file.parent, file.name, boxes + own + len(own).to_bytes(8, "little"))


def change(draw: Callable[..., Any], folder: Path) -> None:
    """Change one of the files."""
    path = folder / "a.ckpt"
    kind = draw(st.sampled_from(["manifest", "boxes", "state", "bytes", "one file", "special"]))
    names = sorted(entry.name for entry in path.iterdir())
    if kind == "manifest":
        rewrite(path, lambda fields: mutated(draw, fields, [*VALUES, DEEP]))
    elif kind == "boxes":
        found = DecodedBoxes((path / "boxes.bin").read_bytes(), read_manifest(path))
        tables = [found[key].rows.copy() for key in sorted(found)]
        for _ in range(draw(st.integers(1, 3))):
            numbers = draw(st.sampled_from(tables)).reshape(-1)
            at = draw(st.integers(0, len(numbers) - 1))
            numbers[at] = draw(st.sampled_from([-1, 0, 1, 7, numbers[at] ^ 1, *BIG[:3], -(2**63), 2**63 - 1]))
        forge(path, "boxes.bin", encode_boxes(tables))
    elif kind == "state":
        others = [*VALUES, torch.ones(1).expand(2**40), torch.ones(2, 2)]
        torch.save(mutated(draw, torch.load(path / "trainer.pt", weights_only=True), others), folder / "state")
        forge(path, "trainer.pt", (folder / "state").read_bytes())
    elif kind == "bytes":
        file = path / draw(st.sampled_from(names))
        data = mangled(draw, file.read_bytes())
        file.write_bytes(data)
        if file.name not in ("manifest.json", ".metadata"):
            forge(path, file.name, data)
    elif kind == "one file":
        (folder / "b.ckpt").write_bytes(mangled(draw, (folder / "b.ckpt").read_bytes()))
    else:
        file = path / draw(st.sampled_from(names))
        file.unlink()
        draw(st.sampled_from([os.mkfifo, os.mkdir, lambda f: os.symlink("/dev/zero", f), lambda f: None]))(file)


def read_by_all(folder: Path) -> list[str]:
    """Names of readers that could read it. Anything but a sentence of refusal is raised."""
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


def test_changed_checkpoints(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "a")
    assert len(read_by_all(tmp_path / "a")) == 9
    fuzz(good, tmp_path / "a", 10)


def test_a_tensor_of_a_rank_that_repeats_its_values_is_refused(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "a")
    path = tmp_path / "a" / "a.ckpt"
    torch.save({**OWN, "rng": torch.ones(1).expand(2**40)}, tmp_path / "own")
    ends_with(path / "__0_0.distcp", (tmp_path / "own").read_bytes())
    with pytest.raises(CheckpointError, match="a tensor of many more"):
        with_own_states(open_checkpoint(path))


@pytest.mark.soak
def test_many_changed_checkpoints(good: Path, tmp_path: Path) -> None:
    fuzz(good, tmp_path / "a", 10_000)
