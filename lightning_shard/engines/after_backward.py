"""Call a function at the end of a module's backward pass without changing the order of autograd's sums.

FSDP2 and DeepSpeed's stage 3 put a node of autograd's graph between a module and each of its inputs. The module's
gradients of an input are summed in that node before other modules' gradients of the same tensor are added, which is
another order of sums than DDP's. If query, key and value of nn.MultiheadAttention are one tensor, it also gets three
copies, and multiplies in another way. Here the module's outputs depend on one extra node, which depends on nothing.
Autograd runs ready nodes newest first. This node is older than the module's, so it runs after them and after the
accumulation of their gradients, and before the nodes of earlier modules.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shard.precision.casting import map_tensors
from lightning_shard.tensors.tracing import version


def mark(after: Callable[[], Any], device: torch.device) -> Tensor | None:
    """Make the extra node before a module's forward. ``after`` is called when the backward pass of all later nodes is
    over. ``device`` is the module's, because autograd has a queue of nodes per device. None if gradients are disabled.
    """
    if not torch.is_grad_enabled():
        return None
    return _Mark.apply(torch.empty(0, device=device, requires_grad=True), after)


def join(output: Tensor, marked: Tensor, before: Callable[[], Any] | None = None) -> Tensor:
    """Make ``output`` depend on ``marked``. A backward pass from it first calls ``before``."""
    return _Join.apply(output, marked, before)


Given = Mapping[int, tuple[Tensor, int]]
"""Tensors by their ids, each with its version counter."""


def given_tensors(inputs: Any) -> Given:
    """The tensors in the ``inputs`` of a module that is about to run, in containers that `map_tensors` knows."""
    found: dict[int, tuple[Tensor, int]] = {}

    def note(tensor: Tensor) -> bool:
        found[id(tensor)] = tensor, version(tensor)
        return False

    map_tensors(inputs, note, lambda tensor: tensor)
    return found


def replaced(output: Any, given: Given, replace: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``replace`` to the tensors in ``output`` that require gradients, see `map_tensors`. Unchanged inputs
    (``given``) that the module returns stay the same objects, so that gradients can be taken with respect to them.
    """

    def is_own(tensor: Tensor) -> bool:
        _, before = given.get(id(tensor), (None, None))
        return tensor.requires_grad and before != version(tensor)

    return map_tensors(output, is_own, replace)


def _with_signature(function: Callable[..., Any]) -> Any:
    """``function`` as a static method with a stored signature: autograd computes the signature in each call."""
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
        # Not a view, because torch refuses to change views of a custom function in place.
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
