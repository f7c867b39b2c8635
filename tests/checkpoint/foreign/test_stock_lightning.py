"""Stock Lightning's checkpoints, saved in real processes, go on under our strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.inspect import is_foreign
from lightning_shard.errors import CheckpointMismatchError
from tests.checkpoint.compare import assert_equal
from tests.checkpoint.foreign.stock import ROWS, Model, fit, fit_stock, save_stock, state_of
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole


def stock_throughout(kind: str, path: str) -> dict[str, Tensor]:
    """Resume for the last two of four epochs under stock Lightning."""
    trainer = fit_stock(kind, 4, ckpt_path=path)
    if kind != "fsdp":
        return state_of(trainer)
    with FullyShardedDataParallel.summon_full_params(trainer.lightning_module):
        clean = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in trainer.lightning_module.named_parameters()}
        return {name: parameter.detach().clone() for name, parameter in clean.items()}


def go_on(strategy: str, path: str) -> tuple[dict[str, Tensor], int, int, float]:
    trainer = fit(strategy, 4, ckpt_path=path)
    calls = trainer.lightning_module.net.second.calls
    return state_of(trainer), trainer.global_step, calls, trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sampled(["ddp", "fsdp"], 1))
def test_a_stock_checkpoint_goes_on_as_under_stock_lightning(tmp_path: Path, stock_folders: Path, kind: str) -> None:
    """Bitwise: at two processes a sum has one order on every engine."""
    path = str((stock_folders if kind == "fsdp" else tmp_path) / kind)
    if kind != "fsdp":
        run_distributed(save_stock, 2, kind, path)
    assert is_foreign(path)
    expected = run_distributed(stock_throughout, 2, kind, path)[0]
    found = {name: run_distributed(go_on, 2, name, path)[0] for name in ("shard_ddp", "shard_fsdp")}
    for name, (state, *rest) in found.items():
        assert rest == [32, 32, 0.05 * 0.5**4]
        for key, tensor in expected.items():
            assert torch.equal(state[key], tensor), f"{name}: {key}"
    assert_equal(found["shard_fsdp"][0], found["shard_ddp"][0])
    assert "net.first.weight.exp_avg_sq" in found["shard_ddp"][0]


class OneGroup(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.first.parameters())

    def test_step(self, rows: Tensor, index: int) -> None:
        self.log("loss", self.training_step(rows, index))


def evaluate_stock(path: str) -> tuple[dict[str, Tensor], str]:
    """Weights alone are read in another loop than fit. Returned: they, and the refusal of a fit."""
    module = OneGroup()
    quiet_trainer(strategy="shard_fsdp").test(module, DataLoader(ROWS, 4), ckpt_path=path, verbose=False)
    with pytest.raises(CheckpointMismatchError) as refused:
        fit("shard_fsdp", 4, ckpt_path=path, module=OneGroup)
    return {name: whole(p) for name, p in module.named_parameters()}, str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_a_stock_file_is_evaluated_and_other_optimizers_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "stock.ckpt")
    run_distributed(save_stock, 1, "single", path)
    expected = torch.load(path, weights_only=True)["state_dict"]
    for found, refused in run_distributed(evaluate_stock, 2, path):
        assert_equal(found, {name: tensor for name, tensor in expected.items() if name in found})
        assert "optimizers that step [4] parameters, here they step [2]" in refused
