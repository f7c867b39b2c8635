"""A function is called when a module's backward pass is over, and no sum of gradients changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_shard.engines.after_backward import join, mark, replaced

CPU = torch.device("cpu")


class Reader(nn.Module):
    """Reads its input several times, so that what it sends back is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.one(x)) + self.other(x) / (1 + x.square())


def _run(blocks: list[nn.Module], *, marked: bool, events: list[str]) -> list[Tensor]:
    """Gradients of the input and all parameters, by a loss in which the first block is run twice."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    total: Any = 0
    for index in [*range(len(blocks)), 0]:
        begun = mark(lambda index=index: events.append(f"after {index}"), CPU)
        assert begun is not None
        output = blocks[index](x)
        output.register_hook(lambda _, index=index: events.append(f"before {index}"))
        output = join(output, begun) if marked else output
        total = total + output.relu_()
    for name, parameter in nn.ModuleList(blocks).named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    total.square().mean().backward()
    found = [x.grad, *(p.grad for b in blocks for p in b.parameters())]
    return [gradient for gradient in found if gradient is not None]


def test_it_is_called_between_two_modules_and_sums_stay() -> None:
    torch.manual_seed(3)
    blocks = [Reader(), Reader()]
    plain = _run(blocks, marked=False, events=[])
    nn.ModuleList(blocks).zero_grad()
    events: list[str] = []
    found = _run(blocks, marked=True, events=events)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), "sums changed"
    order = [event for event in events if " " in event]
    assert order == [f"{time} {index}" for index in (0, 1, 0) for time in ("before", "after")]
    # Those of the block that runs twice are complete with its last run.
    for index, last in ((0, len(events) - 1), (1, events.index("after 1"))):
        begins = events.index(f"before {index}")
        own = [i for i, event in enumerate(events) if event.startswith(f"{index}.")]
        assert len(own) == 4
        assert all(begins < i < last for i in own), events


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Box:
    inside: dict[str, list[Tensor]]
    note: str


def test_tensors_in_any_output_are_found() -> None:
    calls: list[int] = []
    begun = mark(lambda: calls.append(1), CPU)
    assert begun is not None
    x = torch.ones(2, requires_grad=True)
    whole = torch.arange(2)
    output = replaced((Pair(x * 2, whole), Box({"k": [x * 3]}, "n")), {}, lambda tensor: join(tensor, begun))
    assert output[0].b is whole
    assert output[1].note == "n"
    (output[0].a.sum() + output[1].inside["k"][0].sum()).backward()
    assert calls == [1]
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5]
    with torch.no_grad():
        assert mark(lambda: None, CPU) is None


def test_transforms_of_functions_pass() -> None:
    def squares(x: Tensor) -> Tensor:
        begun = mark(lambda: None, CPU)
        assert begun is not None
        return join(x**2, begun).sum()

    x = torch.tensor([1.0, 2.0])
    assert torch.func.grad(squares)(x).tolist() == [2, 4]
    assert torch.func.vmap(torch.func.grad(squares))(x[:, None]).tolist() == [[2], [4]]
    assert torch.func.jvp(squares, (x,), (torch.ones(2),))[1].item() == 6
