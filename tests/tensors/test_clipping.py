"""Clipping: torch's numbers on plain tensors, the same number however gradients are cut, and nothing half done."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_shard.errors import DataError
from lightning_shard.tensors.clipping import clip_by_norm, clip_by_value, gradient_norm, gradients_of
from tests.groups import sampled
from tests.harness import run_distributed

SHAPES = [(7, 3), (5,), (1, 4), (2, 2, 2), (64, 33)]


def with_gradients(seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(dtype)
    return parameters


def clipped(gradients: list[Tensor], max_norm: float, **settings: bool) -> Tensor:
    """The norm before."""
    norm = gradient_norm(gradients)
    clip_by_norm(gradients, max_norm, norm, **settings)
    return norm


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad.clone() for p in parameters if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(scale=st.floats(1e-6, 1e6), max_norm=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_by_norm_is_torchs_clipping(dtype: torch.dtype, scale: float, max_norm: float, seed: int) -> None:
    ours, torchs = with_gradients(seed, scale, dtype), with_gradients(seed, scale, dtype)
    norm = clipped(gradients_of(ours), max_norm)
    expected = nn.utils.clip_grad_norm_(torchs, max_norm)
    # torch sums in the gradients' dtype, in 5 + 5 roundings or so of half a spacing each.
    rtol = 10 * torch.finfo(dtype).eps
    assert norm.dtype == torch.float32
    assert norm.ndim == 0
    torch.testing.assert_close(norm, expected.float(), rtol=rtol, atol=0)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2 * rtol, atol=1e-30)


def test_the_coefficient_is_torchs_exactly() -> None:
    ours, torchs = with_gradients(scale=10), with_gradients(scale=10)
    norm = clipped(gradients_of(ours), 0.7)
    nn.utils.clip_grads_with_norm_(torchs, 0.7, norm)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, torchs, strict=True))  # type: ignore[arg-type]
    # A spacing or two above 0.7 at most: torch's 1e-6 in the coefficient keeps it below in all but rounding.
    torch.testing.assert_close(gradient_norm(gradients_of(ours)), torch.tensor(0.7), rtol=3e-7, atol=0)
    assert norm > 0.7
    before = gradients(ours)
    clipped(gradients_of(ours), 1e6)
    assert all(map(torch.equal, before, gradients(ours))), "a small norm changes nothing"


def test_the_norm_is_summed_in_fp64() -> None:
    off = 0
    for seed in range(20):
        parameters = with_gradients(seed)
        exact = torch.cat([g.flatten().double() for g in gradients(parameters)]).square().sum().sqrt().float()
        assert torch.equal(gradient_norm(gradients_of(parameters)), exact)
        off += not torch.equal(nn.utils.get_total_norm(gradients(parameters)), exact)
    assert off > 0, "a sum in fp32 would pass too"
    # Squares that fp32 does not hold.
    for value in (1e30, 1e-30):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.full((2,), value)
        exact = parameter.grad.double().square().sum().sqrt().float()
        assert torch.equal(gradient_norm(gradients_of([parameter])), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_value_is_torchs(dtype: torch.dtype) -> None:
    ours, torchs = with_gradients(dtype=dtype), with_gradients(dtype=dtype)
    clip_by_value(gradients_of(ours), 0.25)
    nn.utils.clip_grad_value_(torchs, 0.25)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, torchs, strict=True))  # type: ignore[arg-type]
    assert max(g.abs().max() for g in gradients(ours)) == 0.25


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite(value: float) -> None:
    parameters = with_gradients()
    parameters[1].grad[2] = value  # type: ignore[index]
    before = gradients(parameters)
    with pytest.raises(DataError, match=r"gradient norm is (inf|nan).*error_if_nonfinite"):
        clipped(gradients_of(parameters), 1.0, error_if_nonfinite=True)
    torch.testing.assert_close(gradients(parameters), before, rtol=0, atol=0, equal_nan=True)
    # Without it, as torch does.
    other = with_gradients()
    other[1].grad[2] = value  # type: ignore[index]
    clipped(gradients_of(parameters), 1.0)
    nn.utils.clip_grad_norm_(other, 1.0)
    torch.testing.assert_close(gradients(parameters), gradients(other), rtol=0, atol=0, equal_nan=True)


# On meshes. The first dims are such that some shards are uneven and some empty.


def cut(parameters: list[nn.Parameter], shape: tuple[int, ...], placements: list[Placement]) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    made = []
    for parameter in parameters:
        made.append(nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
        made[-1].grad = distribute_tensor(parameter.grad, mesh, placements)  # type: ignore[arg-type]
    return made


def _check_on_mesh(shape: tuple[int, ...], placements: list[Placement]) -> None:
    plain = with_gradients(scale=3)
    parameters = cut(plain, shape, placements)
    local = [p.grad.to_local().numel() for p in parameters]  # type: ignore[union-attr]
    if shape[-1] > 1:
        assert local != [p.numel() for p in plain], "nothing was cut"
    # A dim of 1 leaves all ranks but the first of a shard group with nothing.
    assert (0 in local) == (dist.get_rank() % shape[-1] > 0)
    expected = clipped(gradients_of(plain), 0.5)
    # The second time some are whole on every rank, as ignored parameters are.
    for candidates in (
        parameters,
        [*cut(with_gradients(scale=3), shape, placements)[:3], *with_gradients(scale=3)[3:]],
    ):
        assert torch.equal(clipped(gradients_of(candidates), 0.5, error_if_nonfinite=True), expected)
        for found, whole in zip(candidates, plain, strict=True):
            grad = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
            assert torch.equal(grad, whole.grad)  # type: ignore[arg-type]
    clip_by_value(gradients_of(parameters), 0.01)
    clip_by_value(gradients_of(plain), 0.01)
    for found, whole in zip(parameters, plain, strict=True):
        assert torch.equal(found.grad.full_tensor(), whole.grad)  # type: ignore[union-attr, arg-type]


def _check_nonfinite(shape: tuple[int, ...], placements: list[Placement]) -> None:
    parameters = cut(with_gradients(), shape, placements)
    # One rank alone has it, where the gradients are cut.
    if dist.get_rank() == 1 or Shard(0) not in placements:
        parameters[0].grad.to_local()[0, 0] = math.inf  # type: ignore[union-attr]
    before = [p.grad.to_local().clone() for p in parameters]  # type: ignore[union-attr]
    with pytest.raises(DataError, match="gradient norm is inf"):
        clipped(gradients_of(parameters), 1.0, error_if_nonfinite=True)
    assert all(torch.equal(b, p.grad.to_local()) for b, p in zip(before, parameters, strict=True))  # type: ignore[union-attr]


def _check_meshes() -> None:
    world = dist.get_world_size()
    for shape in [(1, world), (world, 1), (2, 2)][: world // 2 + 1]:
        _check_on_mesh(shape, [Replicate(), Shard(0)])
    for placements in ([Shard(0)], [Replicate()]):
        _check_nonfinite((world,), placements)
        expected = gradient_norm(gradients_of(with_gradients()))
        assert torch.equal(gradient_norm(gradients_of(cut(with_gradients(), (world,), placements))), expected)
    _check_on_mesh((world,), [Shard(0)])
    if world == 4:
        matrices = [p for p in with_gradients() if p.ndim > 1]
        expected = gradient_norm(gradients_of(matrices))
        assert torch.equal(gradient_norm(gradients_of(cut(matrices, (2, 2), [Shard(0), Shard(1)]))), expected)


@pytest.mark.parametrize("world_size", sampled([2, 4], 0))
def test_the_same_norm_and_gradients_on_every_mesh(world_size: int) -> None:
    run_distributed(_check_meshes, world_size)


def test_complex_gradients_count_by_their_real_and_imaginary_parts() -> None:
    own, torchs = (nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64)) for _ in range(2))
    values = torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    # A lazily conjugated gradient has no real view.
    own.grad, torchs.grad = values.conj(), values.conj().resolve_conj()
    expected = nn.utils.clip_grad_norm_([torchs], 0.5)
    gradients = gradients_of([own])
    norm = gradient_norm(gradients)
    assert norm == pytest.approx(float(expected), rel=1e-6)  # torch's norm is summed in fp32
    clip_by_norm(gradients, 0.5, norm)
    torch.testing.assert_close(own.grad, torchs.grad)
    clip_by_value(gradients, 0.01)
    assert torch.view_as_real(own.grad).abs().max() <= 0.01
