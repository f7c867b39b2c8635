"""Teachers, queues, centres and last layers of self-supervised methods, written as the contract's page says."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import all_parameters, quiet_trainer
from tests.strategies.engines import ENGINES, differences
from tests.strategies.test_full_parameters import idioms

WIDTH, PATCHES, STEPS = 6, 4, 5


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = x + block(x)
        return self.last(self.norm(x))


class Method(pl.LightningModule):
    """A student and a teacher that follows it: under stock ``ddp`` in place, else as the page says."""

    follows = "on_train_batch_end"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.student, self.teacher = self.build(), self.build().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.page, self.parameters_at_end = idioms(), dict[str, Tensor]()

    def build(self) -> nn.Module:
        return Encoder()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    @property
    def stock(self) -> bool:
        return type(self.trainer.strategy).__module__.startswith("lightning.")

    @torch.no_grad()
    def follow(self, hook: str) -> None:
        if self.follows != hook:
            return
        if not self.stock:
            self.page["average_teacher"](self.trainer, momentum=0.9)
            return
        for student, teacher in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            teacher.lerp_(student, 1 - 0.9)

    def on_train_batch_start(self, *args: Any) -> None:
        self.follow("on_train_batch_start")

    def on_train_batch_end(self, *args: Any) -> None:
        self.follow("on_train_batch_end")

    def on_train_end(self) -> None:
        own = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        self.parameters_at_end = own if self.stock else all_parameters(self.trainer)


class MoCo(Method):
    """Contrasts with a queue of all ranks' keys, and has the teacher follow ahead of each step."""

    follows = "on_train_batch_start"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", functional.normalize(torch.randn(16, WIDTH)), persistent=False)
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].flatten(0, 1)
        queries, queue, at = functional.normalize(self.student(x).float()), self.queue, int(self.at)
        assert isinstance(queue, Tensor)
        with torch.no_grad():
            keys = functional.normalize(self.teacher(x.roll(1, 1)).float())
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.clone().T], 1) / 0.2
        sent = self.all_gather(keys).flatten(0, 1)[:8]
        queue[at : at + 8] = sent
        self.at.fill_((at + 8) % len(queue))  # type: ignore[operator] # a buffer
        return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class BYOL(Method):
    """Two views that predict each other's, each of which runs the student."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), Encoder())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        views = batch[0].flatten(0, 1), batch[0].flatten(0, 1).roll(1, 1)
        with torch.no_grad():
            targets = [functional.normalize(self.teacher(view).float()) for view in views]
        found = [functional.normalize(self.predictor(self.student(view)).float()) for view in views]
        return functional.mse_loss(found[0], targets[1]) + functional.mse_loss(found[1], targets[0])


class DINO(Method):
    """A centre of all ranks' outputs, and a last layer of unit rows without gradients in the first steps."""

    def build(self) -> nn.Module:
        encoder = Encoder()
        encoder.last = weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        encoder.last.parametrizations.weight.original0.data.fill_(1)  # type: ignore[union-attr]
        encoder.last.parametrizations.weight.original0.requires_grad_(False)  # type: ignore[union-attr]
        return encoder

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, center = batch[0].flatten(0, 1), self.center
        assert isinstance(center, Tensor)
        with torch.no_grad():
            taught = self.teacher(x).float()
            targets = ((taught - center) / 0.1).softmax(-1)
            mean = taught.mean(0)
            dist.all_reduce(mean)
            center.mul_(0.9).add_(mean / dist.get_world_size(), alpha=0.1)
        crops = [self.student(x.roll(by, 1)).float() for by in (1, 2)]
        return torch.stack([-(targets * (crop / 0.5).log_softmax(-1)).sum(-1).mean() for crop in crops]).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step >= 2:
            return
        if not self.stock:
            self.page["cancel_gradients"](self.trainer)
            return
        for parameter in self.student.last.parameters():  # type: ignore[union-attr]
            if parameter.grad is not None:
                parameter.grad.zero_()


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask, self.net = nn.Parameter(0.1 * torch.randn(PATCHES, WIDTH)), Encoder()

    def forward(self, context: Tensor, hidden: Tensor) -> Tensor:
        asked = self.mask[hidden].expand(len(context), -1, -1)
        return self.net(asked + context.mean(1, keepdim=True))


class JEPA(Method):
    """Predicts what a teacher says of patches that the student does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = Predictor()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        patches = torch.randperm(PATCHES)
        seen, hidden = patches[:2], patches[2:]
        with torch.no_grad():
            targets = functional.layer_norm(self.teacher(batch[0]).float(), (WIDTH,))[:, hidden]
        found = self.predictor(self.student(batch[0][:, seen]), hidden)
        return functional.smooth_l1_loss(found.float(), targets)


METHODS = [MoCo, BYOL, DINO, JEPA]


def _fit(kind: type[Method], strategy: Any, precision: str) -> dict[str, Tensor]:
    pl.seed_everything(11, verbose=False)
    module = kind()
    data = TensorDataset(torch.randn(64, PATCHES, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=STEPS)
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
    return module.parameters_at_end


def _differences(kinds: list[type[Method]], engines: list[str], precision: str) -> dict[str, list[str]]:
    """By method and engine the parameters that are not those of stock ``ddp``, or in 16 bits of the first engine."""
    found = {}
    for kind in kinds:
        stock = precision == "32-true"
        wanted = _fit(kind, "ddp" if stock else ENGINES[engines[0]](aligned=True), precision)
        for engine in engines if stock else engines[1:]:
            own = _fit(kind, ENGINES[engine](aligned=True), precision)
            found[f"{kind.__name__}, {engine}"] = [*differences(wanted, own)]
    return {key: names for key, names in found.items() if names}


@pytest.mark.parametrize("kind", sampled(METHODS, METHODS.index(DINO)))
def test_methods_have_stock_ddps_weights(kind: type[Method]) -> None:
    assert run_distributed(_differences, 2, [kind], ["full", "zero_3"], "32-true") == [{}, {}]


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_methods_are_equal_on_every_engine(precision: str) -> None:
    engines = ["ddp", "full", "grad_op", "offload", "zero_1", "zero_2", "zero_3"]
    assert run_distributed(_differences, 2, METHODS, engines, precision, timeout=300) == [{}, {}]
