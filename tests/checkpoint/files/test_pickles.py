"""What a pickle may cost is seen before it is opened, and honest ones pass."""

from __future__ import annotations

import collections
import io
import pickle
import random
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard.checkpoint.files.trainer_state import check_pickle
from lightning_shard.checkpoint.inspect import verify
from lightning_shard.errors import CheckpointCorruptError

LISTS = b"".join(b"h" + bytes([i]) + b"]q" + bytes([i + 1]) + b"ah%ch%ca00" % (i, i + 1) for i in range(60))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x80\x04Nr\xff\xff\xff\x0f.", id="a memo of gigabytes"),
        pytest.param(b"\x80\x04}N\x85" + b"q\0h\0\x86" * 40 + b"Ns.", id="a key that takes ages to hash"),
        pytest.param(b"\x80\x04}N" + b"\x85" * 1_000_000 + b"Ns.", id="a key beyond the end of the stack"),
        pytest.param(b"\x80\x04]q\0" + LISTS + b".", id="lists that stand in lists"),
        pytest.param(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\1\x85R.", id="four gigabytes of zeros"),
        pytest.param(b"\x80\x02ctorch\nFloatTensor\nJ\0\0\0\x7f\x85R.", id="a tensor without a storage"),
        pytest.param(b"\x80\x02c_codecs\nencode\nX\2\0\0\0abX\3\0\0\0hex\x86R.", id="text that grows"),
    ],
)
def test_what_takes_no_end_is_refused_at_once(data: bytes, tmp_path: Path) -> None:
    started = time.process_time()
    with pytest.raises(CheckpointCorruptError):
        check_pickle(data)
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", data)
    with pytest.raises(CheckpointCorruptError, match=r"a\.ckpt was refused"):
        verify(tmp_path / "a.ckpt")
    assert time.process_time() - started < 1


def test_records_that_lie_in_each_other_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(1, protocol=2))
        archive.writestr("archive/data/0", b"x" * 1000)
        archive.filelist += [archive.filelist[1]] * 5
    with pytest.raises(CheckpointCorruptError, match="lie in each other"):
        verify(tmp_path / "a.ckpt")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_honest_ones_pass(protocol: int) -> None:
    adam = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    plain: dict[str, Any] = {"a": (1, 2), "b": [1, {2: (3,)}], "c": collections.OrderedDict(x=1), "s": {1, 2}}
    more = {"f": frozenset([1]), "bytes": b"abc", "array": bytearray(b"xyz"), "random": random.getstate(), "z": 1 + 2j}
    check_pickle(pickle.dumps({**plain, **more, "same": [(1, 2)] * 9}, protocol=protocol))
    saved = io.BytesIO()
    torch.save(
        {**plain, "t": torch.ones(3, dtype=torch.uint16), "p": nn.Parameter(torch.ones(2)), "o": adam.state_dict()},
        saved,
        pickle_protocol=protocol,
    )
    check_pickle(zipfile.ZipFile(saved).read("archive/data.pkl"))
