"""Optimizers that are not elementwise, made early, read the loss, draw numbers: DDP's numbers, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from lightning_shard import full_tensor
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import VOCAB, loader, quiet_trainer
from tests.optimizers import Codes, Lamb, Noisy, NormalizedTogether
from tests.strategies.indexed import PRECISIONS, Indexed, data, refusal, same_everywhere


def _bitsandbytes(kind: str, *args: Any, **settings: Any) -> Optimizer:
    import bitsandbytes.optim

    made: Optimizer = getattr(bitsandbytes.optim, kind)(*args, **settings)
    return made


def _torchao(kind: str, *args: Any, **settings: Any) -> Optimizer:
    import torchao.optim

    torch.compiler.set_stance("force_eager")  # It compiles a step for each shape.
    made: Optimizer = getattr(torchao.optim, kind)(*args, **settings)
    return made


QUANTISED = {kind: partial(_torchao, kind) for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8")}
QUANTISED |= {f"bitsandbytes {kind}": partial(_bitsandbytes, kind) for kind in ("AdamW8bit", "Lion8bit")}
MAKES: dict[str, Callable[..., Optimizer]] = {
    "lamb": Lamb,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
    "rprop": torch.optim.Rprop,  # elementwise, by an operator that DTensors take from torch 2.15 on
    "adamw": torch.optim.AdamW,
    "codes": Codes,
    "together": NormalizedTogether,
    "noisy": Noisy,
    **QUANTISED,
}
STATE = {
    "lamb": "square",
    "codes": "codes",
    "adafactor": "row_var",
    "muon": "momentum_buffer",
    "AdamW8bit": "exp_avg.codes",
}
SHARDING = [f"shard_{name}_aligned" for name in ("fsdp", *(f"deepspeed_stage_{stage}" for stage in (1, 2, 3)))]
HOST = [f"shard_{name}_offload_aligned" for name in ("fsdp", "deepspeed_stage_2", "deepspeed_stage_3")]
ALL = [*SHARDING, *HOST, "shard_fsdp_hybrid_aligned", "shard_fsdp_grad_op_aligned"]


class Model(pl.LightningModule):
    """Parameters of one and two dimensions, one of fewer elements than ranks; finds what there is at the end."""

    def __init__(self, make: str, *, early: bool = False, state: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.make, self.state = make, state
        self.embed = nn.Embedding(VOCAB, 16)
        wide = 256 if make in QUANTISED else 49  # which quantise parameters of 4,096 elements
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, wide), nn.GELU(), nn.Linear(wide, 16)) for _ in range(2)
        )
        self.gain = nn.Parameter(torch.ones(1, 1))
        self.head = nn.Linear(16, VOCAB)
        if make == "muon":
            for parameter in self.parameters():
                parameter.requires_grad_(parameter.ndim == 2)
        self.optimizer = self.made() if early else None
        self.found: dict[str, Tensor | None] = {}

    def made(self) -> Optimizer:
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim == 2]
        others = [p for p in self.parameters() if p.requires_grad and p.ndim != 2]
        groups = [{"params": matrices}, {"params": others, "lr": 2e-2}]
        return MAKES[self.make](groups[:1] if self.make == "muon" else groups, lr=1e-2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch[0]) * self.gain
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer or self.made()

    def on_train_end(self) -> None:
        self.found = {name: full_tensor(self.trainer, name) for name, _ in self.named_parameters()}
        if self.state is not None:
            self.found["state"] = full_tensor(self.trainer, "blocks.0.1.weight", self.state)


def _fit(name: str, make: str, *, path: Any = None, early: bool = False, **settings: Any) -> dict[str, Tensor | None]:
    pl.seed_everything(1, verbose=False)
    module = Model(make, early=early, state=STATE.get(make))
    settings = {"max_steps": 6, "gradient_clip_val": 0.5, "precision": "32-true", **settings}
    trainer = quiet_trainer(strategy=name, **settings)
    trainer.fit(module, loader(), ckpt_path=path)
    return module.found


def _save(name: str, make: str, path: Path, **settings: Any) -> None:
    pl.seed_everything(1, verbose=False)
    trainer = quiet_trainer(strategy=name, max_steps=3, gradient_clip_val=0.5, **settings)
    trainer.fit(Model(make), loader())
    trainer.save_checkpoint(path)


def _different(wanted: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> list[str]:
    assert wanted.keys() == found.keys()
    pairs = ((name, tensor, found[name]) for name, tensor in wanted.items())
    return [name for name, one, other in pairs if one is None or other is None or not torch.equal(one, other)]


def _differences(names: list[str], make: str, early: bool = False, **settings: Any) -> dict[str, list[str]]:
    wanted = _fit("shard_ddp_aligned", make, **settings)
    found = {name: _different(wanted, _fit(name, make, early=early, **settings)) for name in names}
    return {name: different for name, different in found.items() if different}


@pytest.mark.parametrize("make", sampled(["adafactor", "rprop"], 0))
def test_engines_agree_bitwise(make: str) -> None:
    assert run_distributed(_differences, 2, SHARDING, make) == [{}] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("make", ["lamb", "adafactor", "muon"])
def test_all_forms_agree_bitwise(make: str, precision: str, accumulate: int, ranks: int) -> None:
    settings = {"precision": precision, "accumulate_grad_batches": accumulate}
    # Stage 1 reduces sums of micro-batches, the others each one.
    names = [n for n in ALL if accumulate == 1 or "stage_1" not in n]
    assert run_distributed(_differences, ranks, names, make, **settings, timeout=600) == [{}] * ranks


def _resumed(saved_by: str, names: list[str], make: str, folder: Path) -> dict[str, list[str]]:
    wanted = _fit("shard_ddp_aligned", make)
    path = folder / f"{saved_by}.ckpt"
    _save(saved_by, make, path)
    return {name: found for name in names if (found := _different(wanted, _fit(name, make, path=path)))}


@pytest.mark.matrix
@pytest.mark.parametrize("make", ["codes", "adafactor", "lamb"])
@pytest.mark.parametrize("saved_by", ["shard_ddp_aligned", "shard_fsdp_aligned", "shard_deepspeed_stage_2_aligned"])
def test_a_run_goes_on_on_another_engine(saved_by: str, make: str, tmp_path: Path) -> None:
    names = ["shard_ddp_aligned", "shard_fsdp_aligned", "shard_deepspeed_stage_3_aligned"]
    assert run_distributed(_resumed, 2, saved_by, names, make, tmp_path) == [{}] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("kind", list(QUANTISED))
def test_quantised_states_agree_bitwise_resumed_and_switched(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes.optim" if kind.startswith("bitsandbytes") else "torchao.optim")
    assert run_distributed(_differences, 2, SHARDING, kind, timeout=400) == [{}] * 2
    for saved_by in ("shard_ddp_aligned", "shard_fsdp_aligned"):
        names = ["shard_ddp_aligned", "shard_fsdp_aligned", "shard_deepspeed_stage_2_aligned"]
        assert run_distributed(_resumed, 2, saved_by, names, kind, tmp_path, timeout=400) == [{}] * 2


@pytest.mark.matrix
def test_an_optimizer_made_in_init_steps_what_replaced_its_parameters() -> None:
    assert run_distributed(_differences, 2, SHARDING, "adamw", early=True, precision="bf16-mixed") == [{}] * 2


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("shard_fsdp_aligned", "together", "couples parameters"),
        ("shard_deepspeed_stage_2_aligned", "noisy", "draws random numbers"),
    ],
)
def test_what_no_rank_can_step_in_part_is_refused_before_the_first_step(name: str, make: str, reason: str) -> None:
    for error, said in run_distributed(refusal, 2, _fit, name, make):
        assert error == "ConfigurationError"
        assert reason in said
        assert "Use shard_ddp" in said


class Stranger(Model):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW([nn.Parameter(torch.zeros(3))])


def _stranger() -> str:
    return refusal(quiet_trainer(strategy="shard_fsdp", max_steps=1).fit, Stranger("adamw"), loader())[1]


def test_a_parameter_that_the_module_lacks_is_refused() -> None:
    (text,) = run_distributed(_stranger, 1)
    assert "steps a parameter of shape (3,) that the module does not have" in text


def _asked() -> tuple[str, str]:
    trainer = quiet_trainer(strategy="shard_fsdp", max_steps=1)
    module = Model("adafactor")
    module.on_train_batch_end = lambda *_: trainer.optimizers[0].state_dict()  # type: ignore[method-assign]
    return refusal(trainer.fit, module, loader())


def test_a_state_that_owners_have_is_said_to_be_there() -> None:
    [(error, said)] = run_distributed(_asked, 1)
    assert error == "ConfigurationError"
    assert "Use full_tensor(trainer, name, slot)" in said


class ByLoss(torch.optim.Optimizer):
    """As Polyak's step size and AliG: larger steps where the loss is larger. Its step may come without a loss."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = 1.0
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * loss * group["lr"])
        return loss


class SteppedByLoss(Indexed):
    def configure_optimizers(self) -> Any:
        return ByLoss(self.parameters())


@pytest.mark.matrix
@PRECISIONS
def test_ranks_step_by_the_mean_of_their_losses(precision: str) -> None:
    same_everywhere(SteppedByLoss, precision, strategies=("ddp", "full", "zero_2"))


class Drawing(Indexed):
    """Ranks draw different numbers before each step, and the optimizer draws in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1 + self.global_rank)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return Noisy(self.parameters(), lr=0.01)


@PRECISIONS
def test_replicas_draw_the_same_numbers_in_a_step(precision: str) -> None:
    same_everywhere(Drawing, precision, strategies=("ddp",))


class MadeEarly(torch.optim.SGD):
    """As DeMo, makes its state in its constructor, and computes with plain tensors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["scale"] = torch.full_like(p, 0.5, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.addcmul_(self.state[p]["scale"], torch.full(p.shape, 0.01, device=p.device))
        return loss


class SteppedByMadeEarly(Indexed):
    def configure_optimizers(self) -> Any:
        return MadeEarly(self.parameters(), lr=0.05)


def test_state_of_a_constructor_goes_to_what_replicas_step() -> None:
    same_everywhere(SteppedByMadeEarly, "bf16-mixed", strategies=("ddp",))


class HookedApart(Indexed):
    """A hook changes the gradients of each rank otherwise."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.mul_(1 + self.global_rank)


class LeavesOut(Indexed):
    """DDP waits for the head's gradients, and has reduced none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.body(batch[1]).square().mean()


def _refused_apart(kind: Any) -> tuple[str, str]:
    return refusal(quiet_trainer(strategy="shard_ddp", max_epochs=1).fit, kind(), data())


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (HookedApart, "Ranks have other values of body.0.weight"),
        (LeavesOut, "does not depend on head.weight, head.bias, and DDP waits"),
    ],
)
def test_what_parts_replicas_is_refused(kind: Any, says: str) -> None:
    for error, said in run_distributed(_refused_apart, 2, kind):
        assert error == "ConfigurationError"
        assert says in said
