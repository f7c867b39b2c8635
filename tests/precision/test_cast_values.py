"""What a cast makes of tensors and of the containers that they are in, and which buffers become fp32."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers.modeling_outputs import BaseModelOutput

from lightning_shard.precision.casting import cast_floating, widen_statistics

BF16 = torch.bfloat16
Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor
    note: str = "kept"


def f32() -> Tensor:
    return torch.tensor([1.0 + 2.0**-12])


# cast_floating


def test_floating_tensors_alone_are_cast() -> None:
    assert cast_floating(torch.ones(2, dtype=torch.float64), BF16).dtype == BF16
    for dtype in (torch.int64, torch.bool, torch.complex64):
        tensor = torch.ones(2, dtype=dtype)
        assert cast_floating(tensor, BF16) is tensor


def test_containers_keep_their_kind() -> None:
    nested = {
        "list": [f32(), torch.tensor([1])],
        "tuple": (f32(), None),
        "point": Point(f32(), "text"),
        "ordered": OrderedDict(a=f32()),
        "frozen": Frozen(f32()),
        "output": BaseModelOutput(last_hidden_state=f32(), hidden_states=(f32(), f32())),  # type: ignore[arg-type]
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
        "max": torch.ones(2, 2).max(0),
    }
    cast = cast_floating(nested, BF16)
    assert {k: type(v) for k, v in cast.items()} == {k: type(v) for k, v in nested.items()}
    assert cast["list"][0].dtype == BF16
    assert cast["list"][1].dtype == torch.int64
    assert cast["tuple"][1] is None
    assert (cast["point"].x.dtype, cast["point"].y) == (BF16, "text")
    assert cast["ordered"]["a"].dtype == BF16
    assert (cast["frozen"].tensor.dtype, cast["frozen"].note) == (BF16, "kept")
    assert cast["output"].last_hidden_state.dtype == cast["output"]["last_hidden_state"].dtype == BF16
    assert [t.dtype for t in cast["output"].hidden_states] == [BF16, BF16]
    assert isinstance(cast["packed"], PackedSequence)
    assert (cast["packed"].data.dtype, cast["packed"].batch_sizes.dtype) == (BF16, torch.int64)
    assert (cast["max"].values.dtype, cast["max"].indices.dtype) == (BF16, torch.int64)
    # The caller's own are as they were.
    assert nested["list"][0].dtype == nested["frozen"].tensor.dtype == torch.float32  # type: ignore[index, attr-defined]
    assert nested["output"].last_hidden_state.dtype == torch.float32  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value",
    [[torch.ones(1, dtype=BF16)], {"a": torch.tensor([1])}, [], {}, (1, "x"), Frozen(torch.ones(1).bool()), 3.0],
)
def test_what_has_nothing_to_cast_is_returned_itself(value: Any) -> None:
    assert cast_floating(value, BF16) is value


@pytest.mark.parametrize(
    "module",
    [
        nn.SyncBatchNorm(6),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
        nn.utils.spectral_norm(nn.Linear(6, 4)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_statistics_that_were_loaded_in_16_bits_are_fp32(module: nn.Module) -> None:
    root = nn.ModuleDict({"module": module, "other": nn.Module()})
    root["other"].register_buffer("table", torch.ones(2))
    root.to(BF16)
    before = dict(root.named_buffers())
    widen_statistics(root)
    found = {name: buffer.dtype for name, buffer in root["module"].named_buffers() if buffer.is_floating_point()}
    assert set(found.values()) == {torch.float32}
    assert root["other"].table.dtype == BF16
    assert all(buffer is before[name] for name, buffer in root.named_buffers())
