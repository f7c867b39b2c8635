"""The idioms of the contract, written with `full_parameters`, are equal on every engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_shard import full_parameters, registry
from lightning_shard.registry import PRESETS
from tests.groups import sampled
from tests.harness import ROOT, run_distributed
from tests.models import all_parameters, loader, quiet_trainer
from tests.strategies.engines import ENGINES, differences
from tests.strategies.taught import Taught


def idioms() -> dict[str, Callable[..., Any]]:
    """The functions that the guide shows."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "examples/guides/contract.md").read_text(), re.DOTALL)
    functions: dict[str, Any] = {}
    exec(code, functions)
    return functions


BEFORE_STEP = ("mask_gradients", "penalise", "cancel_gradients")
WRITING = ("average_teacher", "clamp_weights", "orthogonalise", *BEFORE_STEP, "reset_head")
ALL = (*WRITING, "log_norm", "has_nan")


class Idioms(pl.Callback):
    """Calls those of ``chosen`` in each step, or in the first ones. A fault adds to one element."""

    def __init__(self, chosen: tuple[str, ...] = ALL, fault: str = "") -> None:
        self.functions, self.chosen, self.fault = idioms(), chosen, fault
        self.nan: list[bool] = []

    def _call(self, name: str, trainer: pl.Trainer) -> Any:
        now = {"reset_head": trainer.global_step == 2, "cancel_gradients": trainer.global_step < 2}.get(name, True)
        if name not in self.chosen or not now:
            return None
        given = {"names": "student.head.*"} if name == "cancel_gradients" else {}
        return self.functions[name](trainer, **given)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        for name in BEFORE_STEP:
            self._call(name, trainer)
        if self.fault in BEFORE_STEP:
            self._fail(trainer, "student.embed.weight", "gradient")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        for name in self.chosen:
            if name not in BEFORE_STEP and name != "has_nan":
                self._call(name, trainer)
        self.nan.append(self._call("has_nan", trainer))
        if self.fault and self.fault not in BEFORE_STEP:
            teacher = self.fault == "average_teacher"
            self._fail(trainer, "teacher.body.0.0.weight" if teacher else "student.head.weight", "parameter")

    def _fail(self, trainer: pl.Trainer, name: str, kind: str) -> None:
        with full_parameters(trainer, name, kind, write=True) as tensors:
            tensors[name].view(-1)[5] += 1e-3

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.parameters = all_parameters(trainer)


def fit(
    strategy: Any, precision: str = "32-true", chosen: tuple[str, ...] = ALL, fault: str = "", **flags: Any
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, used = Taught(), Idioms(chosen, fault)
    settings = {"max_steps": 4, "gradient_clip_val": 0.5, "callbacks": [used], **flags}
    if isinstance(strategy, str):
        strategy = registry.build(strategy, hooks_use_accessor=True)
    trainer = quiet_trainer(strategy=strategy, precision=precision, **settings)
    trainer.fit(module, loader())
    assert set(used.nan) <= {False, None}
    logged = trainer.callback_metrics
    return {"parameters": used.parameters, "losses": module.losses, "norm": logged.get("head_norm", torch.zeros(()))}


def fit_all(engines: list[str], *args: Any) -> dict[str, Any]:
    return {engine: fit(ENGINES[engine](aligned=True, hooks_use_accessor=True), *args) for engine in engines}


def fit_names(names: list[str], *args: Any) -> dict[str, Any]:
    return {name: fit(name, *args) for name in names}


def check_equal(ranks: list[dict[str, Any]]) -> None:
    """Every run of every rank ends in the same parameters, by the same losses."""
    for rank in ranks:
        reference = next(iter(rank.values()))
        for name, run in rank.items():
            assert differences(reference["parameters"], run["parameters"]) == {}, name
            assert differences(next(iter(ranks[0].values()))["parameters"], run["parameters"]) == {}, name
            assert run["losses"] == reference["losses"], name
            assert torch.equal(run["norm"], reference["norm"]), name


def test_the_idioms_are_equal_on_every_engine() -> None:
    check_equal(run_distributed(fit_all, 2, ["ddp", "full", "offload", "zero_2", "zero_3"]))


def fit_each(idiom: str) -> list[dict[str, Any]]:
    """Without the idiom, with it, and with a fault in what it wrote."""
    return [
        fit("shard_fsdp_aligned", "32-true", *given) for given in ((("log_norm",),), ((idiom,),), ((idiom,), idiom))
    ]


@pytest.mark.parametrize("idiom", sampled(WRITING, 0, 3))
def test_an_idiom_and_a_fault_in_it_are_seen(idiom: str) -> None:
    none, right, faulty = run_distributed(fit_each, 2, idiom)[0]
    assert differences(none["parameters"], right["parameters"]) != {}
    assert none["losses"] != right["losses"]
    assert differences(right["parameters"], faulty["parameters"]) != {}
    assert right["losses"] != faulty["losses"]


# Without stage 0, which is DDP, and NVMe, which needs compiled kernels.
NAMES = [name for name in PRESETS if "nvme" not in name and "stage_0" not in name]
ALIGNED = [name for name in NAMES if name.endswith("aligned")]
PLAIN = [name for name in NAMES if name not in ALIGNED]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("names", "precision"),
    [(ALIGNED, "32-true"), (PLAIN, "32-true"), (ALIGNED, "bf16-mixed")],
    ids=["aligned", "plain", "bf16"],
)
def test_the_idioms_are_equal_under_every_name(names: list[str], precision: str) -> None:
    check_equal(run_distributed(fit_names, 2, names, precision, timeout=300))
