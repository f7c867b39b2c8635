"""Optimizers that are not elementwise, for the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def run(closure: Any) -> None:
    if closure is not None:
        with torch.enable_grad():
            closure()


class Lamb(Optimizer):
    """Adam with a trust ratio for each tensor: the norm of its values over that of its update."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        run(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].mul_(first).add_(p.grad, alpha=1 - first)
                state["square"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                update = state["mean"] / (state["square"].sqrt() + 1e-6)
                p.add_(update, alpha=-group["lr"] * float(p.norm() / update.norm().clamp(min=1e-12)))


class Codes(Optimizer):
    """Momentum in blocks of 8-bit integers and a scale each, as plain tensors, which bitsandbytes keeps."""

    def __init__(self, params: Any, lr: float = 1e-2, block: int = 256) -> None:
        super().__init__(params, {"lr": lr, "block": block})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        run(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, blocks = self.state[p], -(-p.numel() // group["block"])
                if not state:
                    state["codes"] = torch.zeros(blocks, group["block"], dtype=torch.int8, device=p.device)
                    state["scale"] = torch.zeros(blocks, 1, device=p.device)
                momentum = state["codes"].float() * state["scale"]
                momentum.view(-1)[: p.numel()].mul_(0.9).add_(p.grad.flatten())
                state["scale"].copy_(momentum.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127)
                state["codes"].copy_((momentum / state["scale"]).round())
                p.add_(momentum.view(-1)[: p.numel()].view(p.shape), alpha=-group["lr"])


class NormalizedTogether(Optimizer):
    """Gradient descent by one norm over all parameters: no rank can step a part of them."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        run(closure)
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in stepped]).norm()
        for p in stepped:
            p.add_(p.grad / norm, alpha=-self.param_groups[0]["lr"])


class Noisy(NormalizedTogether):
    """Adds noise to each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        run(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.add_(p.grad + torch.randn_like(p), alpha=-self.param_groups[0]["lr"])
