"""Options of Lightning's DDP on ``ShardDDPStrategy``: each is honoured, or refused with its reason."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_shard import ConfigurationError, ShardDDPStrategy, ShardFSDPStrategy
from lightning_shard.ranks import Ranks
from tests.harness import ROOT, run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters

STEPS = 6


def _fit(**options: Any) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    module = TinyLM()
    quiet_trainer(strategy=ShardDDPStrategy(**options), max_steps=STEPS).fit(module, loader())
    return whole_parameters(module)


def _largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def _same_on_all_ranks(parameters: dict[str, Tensor]) -> bool:
    flat = torch.cat([p.flatten() for p in parameters.values()])
    return all(torch.equal(flat, other) for other in Ranks.of().gather(flat))


OPTIONS = [
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "broadcast_buffers": False, "bucket_cap_mb": 0.001},  # small: several buckets
]


def _options_that_change_nothing() -> list[Any]:
    module = TinyLM()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="static_graph is true, but manual optimization"):
        quiet_trainer(strategy=ShardDDPStrategy(static_graph=True), max_steps=1).fit(module, loader())
    plain = _fit()
    return [options for options in OPTIONS if _largest_difference(plain, _fit(**options)) != 0.0]  # type: ignore[arg-type]


def test_options_change_no_number() -> None:
    assert run_distributed(_options_that_change_nothing, 2) == [[], []]


def _hooks() -> dict[str, tuple[float, bool]]:
    calls = []

    # Without annotations: torch reads them, and here they would be strings.
    def counting(state, bucket):  # type: ignore[no-untyped-def]
        calls.append(state)
        return default_hooks.allreduce_hook(None, bucket)

    plain = _fit()
    results = {}
    for name, options in {
        "own": {"comm_hook": counting, "comm_state": "mine"},
        # torch's bf16 hook refuses anything but NCCL.
        "fp16": {"comm_hook": "fp16_compress"},
    }.items():
        parameters = _fit(**options)
        results[name] = (_largest_difference(plain, parameters), _same_on_all_ranks(parameters))
    assert calls == ["mine"] * len(calls)
    assert len(calls) >= STEPS
    return results


def test_communication_hooks_are_used() -> None:
    for results in run_distributed(_hooks, 2):
        assert results["own"] == (0.0, True)
        difference, same = results["fp16"]
        assert difference > 0.0
        assert same


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aligned": True, "comm_hook": "fp16_compress"}, "comm_hook is fp16_compress.*aligned"),
        ({"comm_state": "mine"}, "comm_state is given, but comm_hook is None"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ShardDDPStrategy(**options)


@pytest.mark.parametrize("option", ["static_graph", "gradient_as_bucket_view"])
def test_what_replicate_lacks_is_refused_before_training(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}: True can't be used with precision 'bf16-mixed'"):
        pl.Trainer(strategy=ShardDDPStrategy(**{option: True}), accelerator="cpu", devices=2, precision="bf16-mixed")


def test_one_process_alone_may_be_a_notebook() -> None:
    one, two = (pl.Trainer(strategy="shard_fsdp", accelerator="cpu", devices=devices) for devices in (1, 2))
    assert one.strategy.launcher.is_interactive_compatible
    assert not two.strategy.launcher.is_interactive_compatible


def test_a_strategy_is_sent_to_processes_that_are_spawned() -> None:
    sent = pickle.loads(pickle.dumps(ShardFSDPStrategy(start_method="spawn", nonfinite="raise")))
    assert sent._settings == ShardFSDPStrategy(start_method="spawn", nonfinite="raise")._settings


STARTS = """
import os, sys
import lightning.pytorch as pl, torch
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_shard

kind, method, precision = sys.argv[1:]
quiet = {"accelerator": "cpu", "devices": 2, "max_steps": 3, "logger": False, "enable_checkpointing": False}

if __name__ == "__main__":
    model = BoringModel()
    before = model.layer.weight.detach().clone()
    strategy = getattr(lightning_shard, kind)(start_method=method)
    pl.Trainer(strategy=strategy, precision=precision, **quiet).fit(model)
    print("trained:", type(model.layer.weight).__name__, not torch.equal(before, model.layer.weight))
    pl.Trainer(strategy="shard_fsdp", **{**quiet, "devices": 1}).fit(BoringModel())
    for started in (False, True):
        if started:
            os.environ["LOCAL_RANK"] = "0"
        strategy = getattr(lightning_shard, kind)(start_method=method)
        try:
            pl.Trainer(strategy=strategy, **quiet).fit(model)
        except lightning_shard.ConfigurationError as error:
            print("refused:", error)
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    "arguments", [("ShardDDPStrategy", "fork", "32-true"), ("ShardFSDPStrategy", "spawn", "bf16-mixed")]
)
def test_processes_that_are_started_hand_the_weights_back(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """And are not started from a process with a group, which each would take for its own and train alone."""
    (tmp_path / "starts.py").write_text(STARTS)
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "starts.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert "trained: Parameter True" in done.stdout, done.stderr[-3000:]
    refused = "refused: The Trainer asks for 2 processes, but this one is in a group of 1"
    assert done.stdout.count(refused) == 2, done.stderr[-3000:]


class Embeds(TinyLM):
    """One gradient of the last rank is NaN in a batch."""

    sparse = True

    def configure_model(self) -> None:
        super().configure_model()
        self.embed.sparse = self.sparse

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx != 3 or self.global_rank == 0:
            return loss
        x = self.embed(batch[0])
        return loss + (x.detach() - x).square().sum().sqrt()  # 0, and its gradient 0 * inf

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def _fit_sparse(sparse: bool, settings: dict[str, Any], callbacks: Any = (), **trainer: Any) -> tuple[Any, list[str]]:
    module, strategy = Embeds(), ShardDDPStrategy(**settings)
    module.sparse = sparse
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(strategy=strategy, max_steps=4, accumulate_grad_batches=2, callbacks=[*callbacks], **trainer).fit(
            module, loader(shuffle=False)
        )
    return whole_parameters(module), [str(each.message) for each in caught]


SKIPS = {"nonfinite": {"action": "skip", "find_module": True}}
BY_VALUE = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}


def _both(settings: dict[str, Any], trainer: dict[str, Any]) -> tuple[list[str], list[str]]:
    (sparse, said), (dense, _) = (_fit_sparse(kind, {**SKIPS, **settings}, **trainer) for kind in (True, False))
    differing = [name for name, tensor in dense.items() if not torch.equal(sparse[name], tensor)]
    return differing, [text for text in said if "The step is skipped." in text]


@pytest.mark.parametrize(
    ("settings", "trainer"), [({"aligned": True}, {"gradient_clip_val": 0.05}), ({"log_grad_norm": True}, BY_VALUE)]
)
def test_they_are_accumulated_clipped_and_looked_at(settings: dict[str, Any], trainer: dict[str, Any]) -> None:
    (differing, (said,)), (other, _) = run_distributed(_both, 2, settings, trainer)
    assert not differing + other
    assert "First on rank 0: the gradient of embed.weight. First on rank 1: the gradient of embed.weight." in said
