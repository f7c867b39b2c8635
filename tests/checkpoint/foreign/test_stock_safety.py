"""Nothing in a stock checkpoint runs, and files that can't be read are named."""

from __future__ import annotations

import io
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.inspect import open_any, verify
from lightning_shard.checkpoint.save import write_portable
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.hostile import Hostile

pytestmark = pytest.mark.usefixtures("deepspeed_tensors")


def test_hostile_stock_directories(tmp_path: Path, stock_folders: Path) -> None:
    cases = {
        "fsdp/meta.pt": "fsdp",
        "zero2/global_step3/mp_rank_00_model_states.pt": "zero2",
        "zero2/global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt": "zero2",
        "zero3/global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt": "zero3",
    }
    for number, (file, folder) in enumerate(cases.items()):
        copy = tmp_path / str(number)
        shutil.copytree(stock_folders / folder, copy / folder)
        open_any(copy / folder)
        torch.save({"x": Hostile()}, copy / file)
        named = rf"{re.escape(Path(file).name)} names tests\.checkpoint\.hostile\.ran.*nothing in it ran"
        with pytest.raises(CheckpointCorruptError, match=named):
            open_any(copy / folder)


def test_hostile_stock_fsdp_metadata_and_items(tmp_path: Path, stock_folders: Path) -> None:
    path = tmp_path / "fsdp"
    shutil.copytree(stock_folders / "fsdp", path)
    original = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointCorruptError, match=r"\.metadata: it names tests\.checkpoint\.hostile\.ran"):
        open_any(path)

    metadata = pickle.loads(original)
    key = "optimizer_0.param_groups.0.lr"
    place = metadata.storage_data[MetadataIndex(key)]
    stream = io.BytesIO()
    torch.save(Hostile(), stream)
    with open(path / place.relative_path, "ab") as file:
        place.offset, place.length = file.tell(), len(stream.getvalue())
        file.write(stream.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorruptError, match=rf"{re.escape(key)}: .*names tests\.checkpoint\.hostile\.ran"):
        open_any(path)

    for changed, said in {"../x.distcp": "not a plain relative path", "other.distcp": "does not list"}.items():
        place.relative_path = changed
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointCorruptError, match=said):
            open_any(path)


def test_deepspeed_directories_that_can_not_be_read(tmp_path: Path, stock_folders: Path) -> None:
    path = tmp_path / "zero2"
    shutil.copytree(stock_folders / "zero2", path)
    (path / "latest").write_text("../zero2/global_step3")
    with pytest.raises(CheckpointCorruptError, match="not a plain relative path"):
        open_any(path)
    (path / "latest").write_text("global_step3")
    states = path / "global_step3"
    (states / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"has the files of 1 ranks, but .*2, 2"):
        open_any(path)
    (states / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no file \*_optim_states\.pt, and only whole"):
        open_any(path)
    shutil.copy(states / "mp_rank_00_model_states.pt", states / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"has mp_rank_01_model_states\.pt, and only whole"):
        open_any(path)


def test_a_converted_directory_is_complete(tmp_path: Path, stock_folders: Path) -> None:
    for name in ("fsdp", "zero2", "zero3"):
        write_portable(tmp_path / name, open_any(stock_folders / name))
        assert_equal(stored(tmp_path / name), stored(stock_folders / name))
        assert verify(tmp_path / name)
        write_full(tmp_path / f"{name}.ckpt", open_any(stock_folders / name))
        assert_equal(stored(tmp_path / f"{name}.ckpt"), stored(stock_folders / name))
        with pytest.raises(CheckpointError, match="has no checksums: convert it"):
            verify(stock_folders / name)
