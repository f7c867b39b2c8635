"""What Lightning's DDP offers, on ``ShardDDPStrategy``: each option is honoured, or refused with its reason."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_shard import ConfigurationError, ShardDDPStrategy, ShardFSDPStrategy
from lightning_shard.ranks import Ranks
from tests.groups import sampled
from tests.harness import ROOT, run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters
from tests.strategies.zero import Manual

STEPS = 6


def _fit(module: TinyLM | None = None, accumulate: int = 1, **options: Any) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    module = module or TinyLM()
    flags = {"max_steps": STEPS, "accumulate_grad_batches": accumulate}
    quiet_trainer(strategy=ShardDDPStrategy(**options), **flags).fit(module, loader())
    return whole_parameters(module)


def _largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def _same_on_all_ranks(parameters: dict[str, Tensor]) -> bool:
    flat = torch.cat([p.flatten() for p in parameters.values()])
    return all(torch.equal(flat, other) for other in Ranks.of().gather(flat))


def _options_that_change_nothing() -> list[str]:
    plain = _fit()
    changed = []
    for name, value in [
        ("static_graph", True),
        ("find_unused_parameters", True),
        ("gradient_as_bucket_view", True),
        ("broadcast_buffers", False),
        # Small enough for several buckets.
        ("bucket_cap_mb", 0.001),
    ]:
        if _largest_difference(plain, _fit(**{name: value})) != 0.0:
            changed.append(name)
    return changed


def test_options_change_no_number() -> None:
    assert run_distributed(_options_that_change_nothing, 2) == [[], []]


def _static_graphs() -> list[float]:
    """How far they are from others where each step has two backward passes."""
    pairs = [
        [_fit(accumulate=2, static_graph=static) for static in (False, True)],
        [_fit(Manual(every=2), static_graph=static) for static in (False, True)],
    ]
    return [_largest_difference(*pair) for pair in pairs]


def test_static_graphs_accumulate() -> None:
    # torch fails where the first pass is not reduced, so that the first step sums in another order.
    for automatic, manual in run_distributed(_static_graphs, 2):
        assert automatic < 1e-6
        assert manual == 0


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
        "power": {
            "comm_hook": powerSGD_hook,
            "comm_state": PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
        },
    }.items():
        parameters = _fit(**options)
        results[name] = (_largest_difference(plain, parameters), _same_on_all_ranks(parameters))
    assert calls == ["mine"] * len(calls)
    assert len(calls) >= STEPS
    return results


def test_communication_hooks_are_used() -> None:
    for results in run_distributed(_hooks, 2):
        assert results["own"] == (0.0, True)
        for name in ["fp16", "power"]:
            difference, same = results[name]
            assert difference > 0.0, name
            assert same, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aligned": True, "comm_hook": "fp16_compress"}, "comm_hook is fp16_compress.*aligned"),
        ({"aligned": True, "comm_hook": powerSGD_hook}, "comm_hook is powerSGD_hook"),
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


@pytest.mark.parametrize("strategy", ["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_2"])
def test_one_process_alone_may_be_a_notebook(strategy: str) -> None:
    one, two = (pl.Trainer(strategy=strategy, accelerator="cpu", devices=devices) for devices in (1, 2))
    assert one.strategy.launcher.is_interactive_compatible
    assert not two.strategy.launcher.is_interactive_compatible


NOTEBOOK = """
import os, sys
import lightning.pytorch as pl, torch
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_shard

strategy = getattr(lightning_shard, sys.argv[1])(start_method="fork")
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, precision=sys.argv[2],
    max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
model = BoringModel()
before = model.layer.weight.detach().clone()
trainer.fit(model)
print("trained:", type(model.layer.weight).__name__, not torch.equal(before, model.layer.weight))
pl.Trainer(accelerator="cpu", devices=1, strategy="shard_fsdp", max_steps=1, logger=False).fit(BoringModel())
for started in (False, True):
    if started:
        os.environ["LOCAL_RANK"] = "0"
    strategy = getattr(lightning_shard, sys.argv[1])(start_method="fork")
    try:
        pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=3, logger=False).fit(model)
    except lightning_shard.ConfigurationError as error:
        print("refused:", error)
"""


ENDS = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_shard

trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="shard_ddp", max_steps=3,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(BoringModel())
trainer.save_checkpoint("saved.ckpt")
"""


@pytest.mark.soak
def test_a_script_that_ends_right_after_a_save_does_not_abort(tmp_path: Path) -> None:
    """A thread of gloo that lets go of a tensor while the interpreter ends aborts it, in about 4 of 10 runs."""
    (tmp_path / "script.py").write_text(ENDS)
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(8):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]


SPAWNED = """
import lightning.pytorch as pl, torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_shard import ShardFSDPStrategy

if __name__ == "__main__":
    strategy = ShardFSDPStrategy(start_method="spawn")
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, logger=False)
    model = BoringModel()
    before = model.layer.weight.detach().clone()
    trainer.fit(model)
    print("trained:", type(model.layer.weight).__name__, not torch.equal(before, model.layer.weight))
"""


@pytest.mark.parametrize("kind", [ShardDDPStrategy, ShardFSDPStrategy])
def test_a_strategy_is_sent_to_processes_that_are_spawned(kind: type[Any]) -> None:
    sent = pickle.loads(pickle.dumps(kind(start_method="spawn", nonfinite="raise")))
    assert sent._settings == kind(start_method="spawn", nonfinite="raise")._settings


@pytest.mark.matrix
def test_spawned_processes_hand_the_weights_back(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPAWNED)
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "trained: Parameter True" in done.stdout, done.stderr[-3000:]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("strategy", "precision"),
    sampled(
        [("ShardDDPStrategy", "32-true"), ("ShardDDPStrategy", "bf16-mixed"), ("ShardFSDPStrategy", "bf16-mixed")], 2
    ),
)
def test_forked_processes_hand_the_weights_back(tmp_path: Path, strategy: str, precision: str) -> None:
    """And are not forked from a process with a group, which each would take for its own and train alone."""
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, str(script), strategy, precision],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "trained: Parameter True" in done.stdout, done.stderr[-3000:]
    refused = "refused: The Trainer asks for 2 processes, but this one is in a group of 1"
    assert done.stdout.count(refused) == 2, done.stderr[-3000:]
