"""`full_parameters`: one mapping of full parameters or gradients on every engine, and the ways to write to it."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_shard import full_parameters, full_tensor
from lightning_shard.errors import ConfigurationError
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import VOCAB, all_parameters, loader, quiet_trainer
from tests.strategies.engines import ENGINES, differences
from tests.strategies.indexed import refusal
from tests.strategies.taught import WIDTH, Taught


class Looks(pl.Callback):
    """Calls ``look`` before the second step, and ``then`` after it."""

    def __init__(self, look: Callable[[pl.Trainer], Any] | None, then: Callable[[pl.Trainer], Any] | None) -> None:
        self.look, self.then, self.seen = look, then, {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1 and self.look is not None:
            self.seen["look"] = self.look(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2 and self.then is not None:
            self.seen["then"] = self.then(trainer)


def look(engine: str, look: Callable[[pl.Trainer], Any] | None, then: Callable[[pl.Trainer], Any] | None) -> Any:
    looks = Looks(look, then)
    trainer = quiet_trainer(strategy=ENGINES[engine](aligned=True), max_steps=2, callbacks=[looks])
    trainer.fit(Taught(), loader())
    return looks.seen


def _named(trainer: pl.Trainer) -> dict[str, Any]:
    with full_parameters(trainer) as everything:
        shapes = {name: tuple(tensor.shape) for name, tensor in everything.items()}
        assert "student.out.weight" in everything
        assert {"student.wrong", "", "wrong.student.out.weight"} & set(everything) == set()
        assert "student.wrong" not in everything
        assert torch.equal(everything["student.out.weight"], everything["student.embed.weight"])
        assert everything.get("student.wrong") is None
        with pytest.raises(KeyError, match=r"no parameter 'student.gian' is among these. Did you mean student.gain"):
            everything["student.gian"]
        for name, tensor in everything.items():
            assert torch.equal(tensor, full_tensor(trainer, name)), name
            assert not tensor.requires_grad
        with pytest.raises(ConfigurationError, match="give it write=True"):
            everything["student.gain"] = torch.zeros(())
    with full_parameters(trainer, ["student.out.weight", "*.gain", "student.embed.weight"]) as some:
        assert list(some) == ["student.out.weight", "student.gain", "teacher.gain"]
        assert torch.equal(some["student.embed.weight"], some["student.out.weight"])
    with pytest.raises(ConfigurationError, match="full_parameters was left: take and write"):
        some["student.gain"]
    with pytest.raises(ConfigurationError, match=r"no parameter 'student.gian'. Did you mean student.gain"):
        full_parameters(trainer, "student.gian").__enter__()
    with pytest.raises(ConfigurationError, match=r"no parameter of the module matches 'stud\*nt.gian'"):
        full_parameters(trainer, "stud*nt.gian").__enter__()
    with pytest.raises(ConfigurationError, match="kind is 'exp_avg', but must be"):
        full_parameters(trainer, kind="exp_avg").__enter__()
    return shapes


def _gradients(trainer: pl.Trainer) -> list[str]:
    with full_parameters(trainer, kind="gradient") as gradients:
        for name, gradient in gradients.items():
            assert torch.equal(gradient, full_tensor(trainer, name, "gradient"))
        return list(gradients)


def _named_all(engines: list[str]) -> list[Any]:
    return [look(engine, _gradients, _named) for engine in engines]


@pytest.mark.parametrize(
    ("engines", "ranks"),
    sampled([(["ddp", "full", "zero_3"], 2), (["grad_op", "offload", "zero_1", "zero_2_offload", "zero_3"], 3)], 0),
)
def test_tensors_have_the_names_and_values_of_full_tensor(engines: list[str], ranks: int) -> None:
    module = Taught()
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    for rank in run_distributed(_named_all, ranks, engines):
        assert rank == [{"look": trained, "then": shapes}] * len(engines)


def _ways(trainer: pl.Trainer) -> None:
    """Each way of writing is read by the next context."""

    def written(name: str) -> Tensor:
        tensor = full_tensor(trainer, name)
        assert tensor is not None
        return tensor

    bias, before = "student.head.bias", written("student.gain")
    with full_parameters(trainer, "student.*", write=True) as tensors:
        held = tensors[bias]
        held.fill_(2.0)
        assert tensors[bias] is held
        alive: list[Any] = []
        for name, tensor in tensors.items():
            assert [ref for ref in alive if ref() is not None] == []
            assert name != bias or tensor is held
            if name not in (bias, "student.gain"):
                alive.append(weakref.ref(tensor))
            tensor.add_(1.0)
            del tensor
        held.mul_(2.0)  # 6: it was there before the loop, and is kept
        tensors["student.out.weight"] = torch.ones(VOCAB, WIDTH, dtype=torch.float64)
        tensors["student.shift"] += 1.0
        for value in tensors.values():
            value.mul_(1.0)
            break
    assert torch.equal(written(bias), torch.full((VOCAB,), 6.0))
    assert torch.equal(written("student.gain"), before + 1.0)
    assert torch.equal(written("student.embed.weight"), torch.ones(VOCAB, WIDTH))
    assert torch.equal(written("student.shift"), torch.full((WIDTH,), 2.5))

    with pytest.raises(ConfigurationError, match=r"parameter of student.body.0.0.weight, student.gain was changed af"):
        _change_late(trainer)
    with pytest.raises(ConfigurationError, match=r"has shape \(2,\), but must have \(\)"):
        _give_another_shape(trainer)
    gain = written("student.gain")
    with pytest.raises(ZeroDivisionError):
        _fail_inside(trainer)
    bias = written("student.head.bias")  # Of which ranks have parts, or none.
    assert torch.equal(bias, torch.ones(VOCAB))
    with full_parameters(trainer) as tensors:
        tensors["student.gain"].fill_(9.0)
    assert torch.equal(written("student.gain"), gain)


def _change_late(trainer: pl.Trainer) -> None:
    with full_parameters(trainer, ["student.body.0.0.weight", "student.gain"], write=True) as tensors:
        for late in list(tensors.values()):
            late.zero_()


def _give_another_shape(trainer: pl.Trainer) -> None:
    with full_parameters(trainer, write=True) as tensors:
        tensors["student.gain"] = torch.ones(2)


def _fail_inside(trainer: pl.Trainer) -> None:
    with full_parameters(trainer, write=True) as tensors:
        tensors["student.head.bias"] = torch.ones(VOCAB)
        full_tensor(trainer, "student.head.bias")
        tensors["student.head.bias"] = torch.ones(VOCAB)
        tensors["student.gain"].fill_(9.0)
        raise ZeroDivisionError


def _ways_all(engines: list[str]) -> None:
    for engine in engines:
        look(engine, None, _ways)


@pytest.mark.parametrize(("ranks", "engines"), sampled([(2, ["full", "zero_3"]), (3, ["ddp", "full", "zero_2"])], 0))
def test_all_ways_to_write_are_written(ranks: int, engines: list[str]) -> None:
    run_distributed(_ways_all, ranks, engines)


class ClipsByHand(Taught):
    """Reads and halves gradients before and after clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def _norm(self) -> Tensor:
        with full_parameters(self.trainer, kind="gradient") as gradients:
            return torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.norms.append(self._norm())
        self.clip_gradients(optimizer, *args, **kwargs)
        self.norms.append(self._norm())
        with full_parameters(self.trainer, "*.head.*", "gradient", write=True) as gradients:
            for gradient in gradients.values():
                gradient.div_(2.0)
        self.norms.append(self._norm())


def _clip_all(engines: list[str]) -> list[Any]:
    runs = []
    for engine in engines:
        pl.seed_everything(1, verbose=False)
        module = ClipsByHand()
        trainer = quiet_trainer(strategy=ENGINES[engine](aligned=True), max_steps=2, gradient_clip_val=0.01)
        trainer.fit(module, loader())
        runs.append((all_parameters(trainer), torch.stack(module.norms)))
    return runs


def test_gradients_are_read_and_written_before_and_after_clipping() -> None:
    for rank in run_distributed(_clip_all, 2, ["ddp", "full", "zero_2", "zero_3"]):
        parameters, norms = rank[0]
        assert norms[0] > 0.02
        assert norms[1].item() == pytest.approx(0.01, rel=1e-4)
        assert norms[2] < norms[1]
        for other, others in rank[1:]:
            assert differences(parameters, other) == {}
            assert torch.equal(norms, others)


HOOKS = [
    name
    for name in vars(pl.Callback)
    if name.startswith("on_") and not re.search("load|save|exception|test|predict|on_fit_end", name)
]


class EveryHook(pl.Callback):
    """Reads a parameter in each hook of a fit."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor]] = []


def _reads(hook: str) -> Callable[..., None]:
    def read(self: EveryHook, trainer: pl.Trainer, *args: Any) -> None:
        with full_parameters(trainer, "student.body.*.weight") as tensors:
            self.seen.append((hook, torch.stack(list(tensors.values()))))

    return read


for _hook in HOOKS:
    setattr(EveryHook, _hook, _reads(_hook))


def _every_hook(engines: list[str]) -> list[Any]:
    runs = []
    for engine in engines:
        hooks = EveryHook()
        pl.seed_everything(1, verbose=False)
        module = Taught()
        used = [hooks] if runs else []
        loop = quiet_trainer(strategy=ENGINES[engine](aligned=True), max_steps=2, callbacks=used)
        loop.fit(module, loader(), loader(count=8))
        runs.append((hooks.seen, module.losses))
    return runs


def test_every_hook_reads_the_same_and_changes_nothing() -> None:
    for (_, losses), *rank in run_distributed(_every_hook, 2, ["ddp", "ddp", "full", "zero_2", "zero_3"]):
        reference, _ = rank[0]
        assert {hook for hook, _ in reference} == {*HOOKS}
        for run, its_losses in rank:
            assert its_losses == losses
            assert [hook for hook, _ in run] == [hook for hook, _ in reference]
            pairs = zip(run, reference, strict=True)
            assert [hook for (hook, one), (_, other) in pairs if not torch.equal(one, other)] == []


def _other_names(trainer: pl.Trainer) -> list[str]:
    rank = trainer.global_rank
    told = []
    for given in (
        {"names": "student.*" if rank else "teacher.*"},
        {"names": ["student.gain", "teacher.gain"][:: 1 if rank else -1]},
        {"names": "student.gain", "write": rank == 0},
    ):
        told.append(refusal(full_parameters(trainer, **given).__enter__))
    return [text for _, text in told]


def _others(engine: str) -> Any:
    return look(engine, None, _other_names)


@pytest.mark.parametrize("engine", sampled(["full", "zero_3"], 0))
def test_ranks_that_ask_for_other_tensors_are_told(engine: str) -> None:
    for rank in run_distributed(_others, 2, engine):
        start = "full_parameters is a collective, but rank 1 asks for other tensors than rank 0"
        assert [said.startswith(start) for said in rank["then"]] == [True] * 3


def test_another_strategy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy, but full tensors are read from a strategy"):
        full_parameters(pl.Trainer(accelerator="cpu", devices=1, logger=False)).__enter__()
