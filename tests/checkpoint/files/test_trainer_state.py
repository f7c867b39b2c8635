"""``trainer.pt``: what would not load is named when it is saved; what is packed to burst is not unpacked."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shard.checkpoint.files.place import place
from lightning_shard.checkpoint.files.trainer_state import decode_state, encode_trainer_state
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from tests.checkpoint.calls import save_tensors, trainer_state
from tests.checkpoint.hostile import Hostile
from tests.checkpoint.test_safety import forge
from tests.harness import run_distributed


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"callbacks": {"Mine": {"foo": Path("/x")}}}, r"callbacks/Mine/foo: pathlib\.PosixPath"),
        ({"a": [1, {"b": Hostile()}]}, r"a/1/b: tests\.checkpoint\.hostile\.Hostile"),
        pytest.param({"f": lambda: 0}, r"f: builtins\.function", id="lambda"),
        ({"a": {Path("/x"): 1}}, r"a: key PosixPath\('/x'\) of type pathlib\.PosixPath"),
    ],
)
def test_state_that_would_not_load_is_named_when_it_is_saved(tmp_path, state, said):
    with pytest.raises(CheckpointError, match=said):
        encode_trainer_state(state)
    with pytest.raises(CheckpointError, match=said):
        save_tensors(tmp_path / "a.ckpt", {}, trainer_state=state)
    assert os.listdir(tmp_path) == []


def sharded_state_error() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        encode_trainer_state({"ema": {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}})
    except CheckpointError as error:
        return str(error)
    return "passed"


def test_a_part_of_a_sharded_tensor_is_no_state():
    for result in run_distributed(sharded_state_error, 2):
        assert "ema/w: torch.distributed.tensor.DTensor" in result


def test_state_that_loads():
    state = {"int": 1, "none": None, "tensor": torch.ones(2, dtype=torch.bfloat16), "tuple": (1, "a"), "b": b"x"}
    state |= {"set": {1, 2}, "dtype": torch.float32, "nested": {"k": [1.5, True]}, "sparse": torch.eye(3).to_sparse()}
    assert repr(decode_state(encode_trainer_state(state), place("trainer.pt"))) == repr(state)


def test_compressed_state_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    save_tensors(path, {"model.w": torch.ones(2)}, {"large": torch.zeros(10**6)})
    with zipfile.ZipFile(path / "trainer.pt") as plain, zipfile.ZipFile(tmp_path / "packed", "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    forge(path, "trainer.pt", (tmp_path / "packed").read_bytes())
    with pytest.raises(CheckpointCorruptError, match=r"trainer\.pt is compressed"):
        trainer_state(path)


def test_numbers_of_numpy_become_pythons() -> None:
    """A callback's best score is often the mean of a list; it was refused at the first save."""
    state = {"callbacks": {"best": np.mean([1.0, 2.0]), "at": [np.int64(3), (np.float32(0.5), np.bool_(True))]}}
    read = torch.load(io.BytesIO(encode_trainer_state(state)), weights_only=True)
    assert read == {"callbacks": {"best": 1.5, "at": [3, (0.5, True)]}}
    assert type(read["callbacks"]["best"]) is float
    with pytest.raises(CheckpointError, match=r"callbacks/losses: numpy\.ndarray"):
        encode_trainer_state({"callbacks": {"losses": np.ones(3), "best": np.float64(1)}})
