"""``trainer.pt``: values that would not load are named when it is saved."""

from __future__ import annotations

import io
import os
from collections import OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_shard.checkpoint.files.location import location
from lightning_shard.checkpoint.files.trainer_state import decode_state, encode_trainer_state
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from lightning_shard.tools import convert
from tests.checkpoint.calls import save_tensors, trainer_state
from tests.checkpoint.hostile import Hostile


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"callbacks": {"Mine": {"foo": Path("/x")}}}, r"callbacks/Mine/foo: pathlib\.PosixPath"),
        ({"a": [1, {"b": Hostile()}]}, r"a/1/b: tests\.checkpoint\.hostile\.Hostile"),
        pytest.param({"f": lambda: 0}, r"f: builtins\.function", id="lambda"),
        ({"a": {Path("/x"): 1}}, r"a: builtins\.dict"),
    ],
)
def test_state_that_would_not_load_is_named_when_it_is_saved(tmp_path, state, said):
    with pytest.raises(CheckpointError, match=said):
        encode_trainer_state(state)
    with pytest.raises(CheckpointError, match=said):
        save_tensors(tmp_path / "a.ckpt", {}, trainer_state=state)
    assert os.listdir(tmp_path) == []


def test_plain_state_is_read_as_it_was_and_numbers_of_numpy_become_pythons() -> None:
    state = {"int": 1, "none": None, "tensor": torch.ones(2, dtype=torch.bfloat16), "tuple": (1, "a"), "b": b"x"}
    state |= {"set": {1, 2}, "dtype": torch.float32, "nested": {"k": [1.5, True]}, "sparse": torch.eye(3).to_sparse()}
    assert repr(decode_state(encode_trainer_state(state), location("trainer.pt"))) == repr(state)
    state = {"best": np.mean([1.0, 2.0]), "at": [np.int64(3), (np.float32(0.5), np.bool_(True))]}
    read = torch.load(io.BytesIO(encode_trainer_state(state)), weights_only=True)
    assert read == {"best": 1.5, "at": [3, (0.5, True)]}
    assert type(read["best"]) is float


KEPT = {
    "array": np.arange(6.0).reshape(2, 3)[:, ::2],
    "others": [np.zeros((0, 2), np.int8), np.array(["a", "bc"]), np.array(["2020-01-02"], "M8[D]"), np.array(1 + 2j)],
    "deque": deque([1, deque([np.ones(1)])], maxlen=3),
    "counts": defaultdict(list, {"a": [frozenset({1, "b"})], 3: (np.float32(0.5), deque())}),
    "none": defaultdict(None, a=np.array([True])),
}


def test_plain_containers_and_arrays_are_read_as_what_they_were(tmp_path) -> None:
    path = tmp_path / "a.ckpt"
    ordered = OrderedDict(x=KEPT)
    ordered.version = 3  # type: ignore[attr-defined]
    save_tensors(path, {}, {"callbacks": ordered})
    assert repr(trainer_state(path)["callbacks"]["x"]) == repr(KEPT).replace("np.float32(0.5)", "0.5")
    read = torch.load(path / "trainer.pt", weights_only=True)["callbacks"]
    assert read.version == 3
    assert not isinstance(read["x"]["array"], np.ndarray)
    found = trainer_state(path)["callbacks"]["x"]
    found["array"] += 1.0  # it is no view of what can't be written
    found["counts"]["new"].append(1)
    # The one-file form is for stock Lightning, which would give a callback something else.
    with pytest.raises(CheckpointError, match=r"callbacks/x/array: numpy\.ndarray; callbacks/x/others/0: numpy"):
        convert(path, tmp_path / "b.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]
    for state in ({"a": np.array([print])}, {"a": defaultdict(lambda: 1)}, {"a": {frozenset({np.int64(1)}): 1}}):
        with pytest.raises(CheckpointError, match="a: "):
            encode_trainer_state(state)


@pytest.mark.parametrize(
    "value",
    [
        {"lightning_shard.kind": "ndarray", "dtype": "O", "shape": (1,), "data": torch.zeros(8, dtype=torch.uint8)},
        {"lightning_shard.kind": "defaultdict", "parts": {}, "factory": "exec"},
        {"lightning_shard.kind": "deque", "parts": 5},
    ],
)
def test_containers_that_are_none_are_refused(tmp_path, value) -> None:
    save_tensors(path := tmp_path / "a.ckpt", {}, {"callbacks": value})
    with pytest.raises(CheckpointCorruptError, match=r"trainer\.pt"):
        trainer_state(path)
