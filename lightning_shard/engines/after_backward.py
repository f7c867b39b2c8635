"""Calling a function when a module's backward pass is over, on all engines without a change to autograd's sums.

FSDP2 and DeepSpeed's stage 3 learn of that by a node of autograd's graph between a module and each of its inputs. What
a module sends back to an input adds up there, before it meets what other modules send back to the same tensor: another
order of sums than DDP's. And where query, key and value of nn.MultiheadAttention are one tensor, it gets three copies,
and multiplies in another way. Here the node is beside the graph: a module's outputs depend on it, and it depends on
nothing. Of the nodes that are ready autograd runs the one that was made last, and this one was made before all of the
module's; so it runs after them and the accumulation of their gradients, and before those of earlier modules.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shard.precision.casting import rebuilt
from lightning_shard.tensors.tracing import version


def mark(after: Callable[[], Any], device: torch.device) -> Tensor | None:
    """To be made before a module's forward: ``after`` is called when the backward pass since then is over. None without
    a graph. Each ``device`` has a queue of nodes.
    """
    if not torch.is_grad_enabled():
        return None
    return _Mark.apply(torch.empty(0, device=device, requires_grad=True), after)


def join(output: Tensor, marked: Tensor, before: Callable[[], Any] | None = None) -> Tensor:
    """``output``, made since `mark`, from which a backward pass reaches ``marked``, and calls ``before`` on its way."""
    return _Join.apply(output, marked, before)


Given = Mapping[int, tuple[Tensor, int]]
"""Tensors by their ids, with how often each was written to."""


def given_tensors(inputs: Any) -> Given:
    """The tensors in ``inputs``, those of a module that is about to run; in containers as of `rebuilt`."""
    found: dict[int, tuple[Tensor, int]] = {}

    def note(tensor: Tensor) -> bool:
        found[id(tensor)] = tensor, version(tensor)
        return False

    rebuilt(inputs, note, lambda tensor: tensor)
    return found


def replaced(output: Any, given: Given, replace: Callable[[Tensor], Tensor]) -> Any:
    """``output`` with what ``replace`` makes of the tensors in it that require gradients; see `rebuilt`. Those that the
    module was ``given`` and hands on as they came stay, so that gradients can be taken with respect to them.
    """

    def is_own(tensor: Tensor) -> bool:
        _, before = given.get(id(tensor), (None, None))
        return tensor.requires_grad and before != version(tensor)

    return rebuilt(output, is_own, replace)


def _with_signature(function: Callable[..., Any]) -> Any:
    """``function`` as a static method with its signature, which autograd asks for in each call, made once."""
    vars(function)["__signature__"] = inspect.signature(function)
    return staticmethod(function)


class _Mark(torch.autograd.Function):
    generate_vmap_rule = True

    @_with_signature
    def forward(anchor: Tensor, after: Callable[[], Any]) -> Tensor:
        return anchor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.after = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.after()
        return None, None


class _Join(torch.autograd.Function):
    generate_vmap_rule = True

    @_with_signature
    def forward(output: Tensor, marked: Tensor, before: Callable[[], Any] | None) -> Tensor:
        # No view, which torch would refuse to change in place.
        return output.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, marked, ctx.before = inputs
        ctx.device = marked.device

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        if ctx.before is not None:
            ctx.before()
        return gradient, torch.empty(0, device=ctx.device), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return tangents[0]
