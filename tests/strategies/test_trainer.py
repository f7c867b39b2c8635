"""Evaluation, callbacks and what a module may ask of its strategy under the Trainer.

`tests/lightning_suite` compares the Trainer's flags, hooks and callbacks with stock Lightning.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter, BatchSizeFinder, ModelPruning
from lightning.pytorch.loops import utilities
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ConfigurationError
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole_parameters
from tests.strategies.indexed import COUNT, Indexed, build, data, refusal, same_everywhere, samples

FSDP, BF16 = "shard_fsdp", "bf16-mixed"
ROUNDING = 2**-6  # Some roundings of bf16, since a batch of another size may be added up in another order.


def predicted(count: int = COUNT) -> Tensor:
    """One process's predictions of all samples. Modules return fp32, whatever they compute in."""
    with torch.no_grad():
        return build().bfloat16()(samples(count).tensors[1].bfloat16()).float()


def _as_on_gpus(function: Any) -> Any:
    """Disguise the backend: Lightning enters inference mode on every one but gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "dist", SimpleNamespace(get_backend=lambda: "nccl"))
        return function()


def _evaluate() -> dict[str, Any]:
    """Loops without a fit, then around one, on the same module, whose steps are never in inference mode."""
    module = build()
    trainer = quiet_trainer(strategy=FSDP, precision=BF16, max_epochs=1, num_sanity_val_steps=0)
    validated = trainer.validate(module, data(), verbose=False)[0]["val_loss"]
    tested = trainer.test(module, data(), verbose=False)[0]["test_loss"]
    indices, outputs = zip(*trainer.predict(module, data()), strict=True)  # type: ignore[arg-type]
    trainer.fit(module, data(), data())
    after_fit = trainer.callback_metrics["val_loss"].item()
    again = trainer.validate(module, data(), verbose=False)[0]["val_loss"]
    assert tested == validated != after_fit == again
    stages = {stage: {(False, False)} for stage in ("val", "test", "predict")}
    assert module.modes == {"train": {(True, False)}, **stages}
    stock = build()
    quiet_trainer(strategy="ddp").validate(stock, data(), verbose=False)
    assert stock.modes == {"val": {(False, True)}}, "the backend is disguised"
    return {"loss": validated, "indices": torch.cat(indices).tolist(), "outputs": torch.cat(outputs)}


def test_validate_test_and_predict_with_and_without_fit() -> None:
    one, other = run_distributed(_as_on_gpus, 2, _evaluate)
    wanted = predicted()
    loss = (wanted - samples().tensors[1].sum(-1)).square().mean().item()
    for rank in (one, other):
        assert rank["loss"] == pytest.approx(loss, rel=ROUNDING)
        torch.testing.assert_close(rank["outputs"], wanted[rank["indices"]], rtol=0, atol=ROUNDING)
    assert sorted(one["indices"] + other["indices"]) == list(range(COUNT))


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[tuple[list[int], list[int]]] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.written.append((prediction[0].tolist(), list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.indices, self.outputs = (torch.cat(parts) for parts in zip(*predictions, strict=True))


def _predict(counts: list[int]) -> list[Any]:
    results = []
    for count in counts:
        writer = Writer()
        trainer = quiet_trainer(strategy=FSDP, precision=BF16, callbacks=[writer])
        trainer.predict(build(), data(batch_size=2, count=count), return_predictions=False)
        assert all(seen == said for seen, said in writer.written)
        results.append((writer.indices, writer.outputs))
    return results


def test_prediction_covers_every_sample_once_where_ranks_have_unequal_numbers() -> None:
    # 24: equal; 23: a smaller last batch on rank 1; 21: rank 1 has one batch less.
    counts = [24, 23, 21]
    for count, *ranks in zip(counts, *run_distributed(_predict, 2, counts), strict=True):
        indices, outputs = (torch.cat(parts) for parts in zip(*ranks, strict=True))
        assert sorted(indices.tolist()) == list(range(count))
        torch.testing.assert_close(outputs, predicted(count)[indices], rtol=ROUNDING, atol=ROUNDING)


def _predict_nothing_on_one() -> None:
    mine = DataLoader(torch.utils.data.Subset(samples(), range(3 * (1 - dist.get_rank()))))
    module = build()
    module.allow_zero_length_dataloader_with_multiple_devices = True
    quiet_trainer(strategy=FSDP, use_distributed_sampler=False).predict(module, mine)


def test_prediction_where_a_rank_has_no_batch() -> None:
    for kind, message in run_distributed(refusal, 2, _predict_nothing_on_one, timeout=30):
        assert kind == "DataError"
        assert "predict dataloader has no batch on rank 1 of 2" in message


def _batch_size() -> None:
    module = build()
    module.batch_size = 2
    quiet_trainer(strategy=FSDP, callbacks=[BatchSizeFinder()], max_steps=1).fit(module, data())


def test_batch_size_finder_is_refused() -> None:
    for kind, message in run_distributed(refusal, 2, _batch_size):
        assert kind == "ConfigurationError"
        assert "Use lightning_shard.callbacks.BatchSizeCallback" in message


def _pruned(strategy: str, **flags: Any) -> dict[str, Tensor]:
    module = build()
    pruned = [(module.body[0], "weight"), (module.body[2], "weight")]
    callback = ModelPruning("l1_unstructured", pruned, amount=0.5, use_lottery_ticket_hypothesis=False)
    trainer = quiet_trainer(strategy=strategy, max_epochs=3, callbacks=[callback], **flags)
    trainer.fit(module, data(), data())
    return whole_parameters(module)


def test_pruning_works_where_parameters_are_whole() -> None:
    one, other = run_distributed(_pruned, 2, "shard_ddp")
    assert all(torch.equal(one[name], other[name]) for name in one)
    zeros = sum(int((one[f"body.{i}.weight"] == 0).sum()) for i in (0, 2))
    # Half of what is left, in each of three epochs.
    assert zeros == (24 + 64) * (1 - 0.5**3)


@pytest.mark.parametrize(
    ("strategy", "flags", "said"),
    [
        (FSDP, {}, "works on full parameters, which Shard"),
        ("shard_ddp", {"enable_checkpointing": True}, "saves other tensors than the module's own"),
    ],
)
def test_pruning_is_refused_where_parameters_are_cut_or_saved(strategy: str, flags: dict[str, Any], said: str) -> None:
    for error, message in run_distributed(refusal, 2, _pruned, strategy, **flags):
        assert error == "ConfigurationError"
        assert said in message


class Collective(Indexed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank = self.global_rank
        self.log("mean", float(rank), sync_dist=True)
        self.log("total", float(rank + 1), sync_dist=True, reduce_fx="sum")
        self.log("epoch_max", float(10 * rank + batch_idx), sync_dist=True, reduce_fx="max", on_epoch=True)
        self.log("own", float(rank))
        output = self(batch[1])
        gathered = self.all_gather(output, sync_grads=True)
        nested = self.all_gather({"rank": torch.tensor([rank]), "list": [torch.tensor(rank * 2.0)]})
        assert nested["rank"].flatten().tolist() == [0, 1]
        assert nested["list"][0].tolist() == [0.0, 2.0]
        assert gathered.shape == (2, *output.shape)
        assert torch.equal(gathered[rank], output)
        strategy = self.trainer.strategy
        strategy.barrier("here")
        assert strategy.broadcast({"from": rank}) == {"from": 0}
        assert strategy.broadcast(rank, src=1) == 1
        assert strategy.reduce(torch.tensor(float(rank + 1))).item() == 1.5
        assert strategy.reduce(torch.tensor(rank + 1), reduce_op="sum").item() == 3
        assert strategy.reduce("text") == "text"
        assert strategy.reduce_boolean_decision(rank == 1) is False
        assert strategy.reduce_boolean_decision(rank == 1, all=False) is True
        assert (strategy.world_size, strategy.global_rank, strategy.is_global_zero) == (2, rank, rank == 0)
        return {"loss": gathered.square().mean(), "extra": output.detach()}


def _collectives() -> tuple[dict[str, float], Any]:
    pl.seed_everything(1, verbose=False)
    module = Collective()
    trainer = quiet_trainer(strategy=FSDP, precision=BF16, max_epochs=1, limit_train_batches=3)
    trainer.fit(module, data())
    return {k: v.item() for k, v in trainer.callback_metrics.items()}, whole_parameters(module)


def test_collectives_of_the_module_and_the_strategy() -> None:
    (one, parameters), (other, others) = run_distributed(_collectives, 2)
    assert (one["mean"], one["total"], one["epoch_max"]) == (0.5, 3.0, 12.0)
    assert (one.pop("own"), other.pop("own")) == (0.0, 1.0)
    assert one == other
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)


def test_sync_batchnorm_is_refused_on_cpu() -> None:
    with pytest.raises(ConfigurationError, match="sync_batchnorm is true, but torch's SyncBatchNorm runs on GPUs"):
        pl.Trainer(strategy="shard_fsdp", accelerator="cpu", devices=2, sync_batchnorm=True)


class ChannelsLast(Indexed):
    """Its convolution's weight lies in memory as the kernels for that layout want it."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, :1, None, None] * torch.linspace(0.1, 1, 36).view(6, 6)
        return super().forward(self.images(images.contiguous(memory_format=torch.channels_last)).mean((2, 3)))


def test_parameters_have_one_layout_in_memory() -> None:
    """Else kernels sum in an order that depends on whether the engine shards."""
    same_everywhere(ChannelsLast, "32-true")
