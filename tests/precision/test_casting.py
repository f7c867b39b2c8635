"""Casting at module boundaries: what is cast, what is left alone, and that all of it can be taken back."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_shard.errors import PrecisionError
from lightning_shard.precision.casting import cast_trainable_parameters, install_casts
from lightning_shard.precision.policy import autocasting, policy_from
from tests.precision.test_cast_values import f32

BF16 = torch.bfloat16
Point = namedtuple("Point", ["x", "y"])


# install_casts: engines show parameters in bf16; here the modules simply are.


class Sees(nn.Module):
    """Writes down what its forward was given, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append((args, kwargs))
        return args[0] * self.weight


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_inputs_are_cast_at_modules_with_parameters() -> None:
    root = Model(inner=Sees(), outer=Model(sees=Sees()), free=nn.Identity(), metric=MeanMetric())
    install_casts(root, BF16)
    root.inner(f32(), torch.tensor([1]), scale=f32(), mask=torch.tensor([True]))
    (args, kwargs) = root.inner.seen[0]
    assert [a.dtype for a in args] == [BF16, torch.int64]
    assert {k: v.dtype for k, v in kwargs.items()} == {"scale": BF16, "mask": torch.bool}
    root.outer.forward = lambda x: root.outer.sees(x)
    root.outer(f32())
    assert root.outer.sees.seen[0][0][0].dtype == BF16
    # Neither a module without parameters nor a metric, whose inputs must stay exact.
    assert root.free(f32()).dtype == torch.float32
    root.metric.update(f32())
    assert root.metric.compute() == f32()
    collected: list[Tensor] = []
    root.inner(f32(), collected)
    assert root.inner.seen[1][0][1] is collected, "a list to write to"
    install_casts(seer := Sees(), BF16)
    seer(f32())
    assert seer.seen[0][0][0].dtype == torch.float32, "the root itself"


def rounded(module: nn.Module) -> nn.Module:
    """A copy in fp32 whose parameters are rounded to bf16."""
    made = copy.deepcopy(module)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(BF16).float()
    return made


def shown_in_bf16(module: nn.Module) -> nn.Module:
    """A copy with its parameters, not its buffers, in bf16, as engines show them."""
    made = copy.deepcopy(module)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(BF16)
    return made


def run_and_saved(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What ``module`` returns, and the tensors that it keeps for backward."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return module(x), kept


def close(found: Tensor | None, expected: Tensor | None) -> None:
    """Equal, but for a spacing of bf16: torch's kernels sum 16-bit inputs in another order than fp32 ones."""
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected.to(BF16), rtol=2**-7, atol=1e-6)


NORMS = [
    (nn.BatchNorm1d(6), (4, 6, 5)),
    (nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (4, 6, 5)),
    (nn.BatchNorm1d(6, affine=False), (8, 6)),
]


@pytest.mark.parametrize(("norm", "shape"), NORMS, ids=["sequences", "instance", "without weights"])
def test_running_statistics_meet_fp32(norm: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.1)
    reference, root = rounded(norm), Model(norm=shown_in_bf16(norm), linear=nn.Linear(1, 1))
    install_casts(root, BF16)
    for step in range(3):
        x = torch.randn(shape).to(BF16)
        mine, theirs = x.clone().requires_grad_(), x.float().requires_grad_()
        out, kept = run_and_saved(root.norm, mine)
        expected = reference(theirs)
        assert out.dtype == BF16
        # The input as it came, and no copy in fp32.
        assert {t.dtype for t in kept if t.numel() >= x.numel()} == {BF16}
        close(out, expected)
        direction = torch.randn(shape).to(BF16)
        out.backward(direction)
        expected.backward(direction.float())
        close(mine.grad, theirs.grad)
        for one, other in zip(root.norm.parameters(), reference.parameters(), strict=True):
            assert one.dtype == one.grad.dtype == BF16  # type: ignore[union-attr]
            if step == 0:
                close(one.grad, other.grad)
    for one, other in zip(root.norm.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert {b.dtype for b in root.norm.buffers()} <= {torch.float32, torch.int64}
    root.norm.eval()
    reference.eval()
    close(root.norm(x), reference(x.float()))


def test_attention_in_eval_takes_no_path_around_the_casts() -> None:
    # torch's fast path of TransformerEncoderLayer reads the weights of its parts without calling them.
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2)
    root = Model(encoder=shown_in_bf16(encoder))
    install_casts(root, BF16)
    mask = torch.tensor([[False, False, True], [False, False, False]])
    x = torch.randn(2, 3, 8)
    root.train()
    in_training = root.encoder(x, src_key_padding_mask=mask)
    root.eval()
    with torch.no_grad():
        in_eval = root.encoder(x, src_key_padding_mask=mask)
    assert in_eval.dtype == in_training.dtype == BF16
    # Without gradients torch's attention sums in another order: a spacing of bf16 or two.
    eps = torch.finfo(BF16).eps
    torch.testing.assert_close(in_eval[~mask], in_training[~mask], rtol=2 * eps, atol=2 * eps)


# cast_trainable_parameters


class Mixed(nn.Module):
    """Parameters of several dtypes, a tie, a frozen one, an integer one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 5, dtype=BF16)
        self.two = nn.Linear(3, 5, dtype=torch.float16)
        self.two.weight = self.one.weight
        self.same = nn.Linear(3, 5)
        self.frozen = nn.Parameter(torch.ones(7, dtype=BF16), requires_grad=False)
        self.count = nn.Parameter(torch.tensor([3]), requires_grad=False)
        self.register_buffer("scale", torch.ones(1, dtype=BF16))


def test_trainable_parameters_become_masters() -> None:
    root = Mixed()
    weight, same = root.one.weight.detach().clone(), root.same.weight
    changed = cast_trainable_parameters(root, torch.float32)
    assert changed == {"one.weight": BF16, "one.bias": BF16, "two.bias": torch.float16}
    assert root.one.weight is root.two.weight
    assert torch.equal(root.one.weight, weight.float())
    assert root.same.weight is same
    assert (root.frozen.dtype, root.count.dtype, root.scale.dtype) == (BF16, torch.int64, BF16)
    assert all(p.requires_grad and p.is_leaf for p in [root.one.weight, root.two.bias])
    assert cast_trainable_parameters(root, torch.float32) == {}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Sums in one order, for comparisons bit by bit.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# What the root's own code is given.


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sees(), Sees()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


def test_the_roots_code_gets_fp32_and_modules_get_the_compute_dtype() -> None:
    root = Model(net=Residual(), blocks=nn.ModuleList([Residual()]))
    undo = install_casts(root.to(BF16), BF16, output=torch.float32)
    with pytest.raises(TypeError):
        root.net("no tensor")
    # Called from the root, also after a failed call: the module, one inside of it, one in a list.
    assert [called(f32()).dtype for called in (root.net, root.net.first, root.blocks[0])] == [torch.float32] * 3
    assert root.net.second.seen[0][0][0].dtype == BF16
    undo()
    assert root.net(f32().to(BF16)).dtype == BF16


def test_the_roots_code_runs_under_autocast_and_modules_do_not() -> None:
    root = Model(net=Residual())
    root.weight = nn.Parameter(torch.ones(1, 1))
    install_casts(root.to(BF16), BF16, output=torch.float32)
    seen: list[bool] = []
    root.net.second.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    with autocasting(policy_from("bf16-mixed", aligned=False), "cpu", cache=False):
        # fp32 from the module times a weight that is seen in bf16.
        assert (root.net(f32()[None]) @ root.weight).dtype == BF16
        with pytest.raises(TypeError):
            root.net("no tensor")
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]


@pytest.mark.parametrize("kind", ["spectral_norm", "parametrizations.spectral_norm", "parametrizations.orthogonal"])
def test_parametrizations_that_need_fp32_weights_are_refused_in_16_bits(kind: str) -> None:
    root = nn.Sequential(attrgetter(kind)(nn.utils)(nn.Linear(3, 3)))
    with pytest.raises(PrecisionError, match="a spectral norm or an orthogonal parametrization, whose fp32 buffers"):
        install_casts(root, torch.bfloat16)
