"""Every row of the precision table under every name: the dtypes that were seen, and the bytes that they take."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ShardPrecision, registry
from lightning_shard.precision.policy import policy_from
from lightning_shard.precision.words import PRECISIONS
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters

STEPS = 3
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Observed(TinyLM):
    """Remembers the dtypes in forward and of the gradients of activations, and what user code is given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.forward_dtypes: set[torch.dtype] = set()
        self.backward_dtypes: set[torch.dtype] = set()
        self.output_dtypes: set[torch.dtype] = set()

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.blocks:
            block.up.register_forward_hook(self._note)

    def _note(self, module: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
        self.forward_dtypes |= {module.weight.dtype, args[0].dtype, output.dtype}
        if output.requires_grad:
            output.register_hook(lambda gradient: self.backward_dtypes.add(gradient.dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        self.output_dtypes.add(logits.dtype)
        return logits

    def configure_optimizers(self) -> Any:
        # AdamW's default eps is zero in fp16, and its second moment underflows; see examples/guides/precision.md.
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


class Gradients(pl.Callback):
    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.dtypes |= {p.grad.dtype for p in module.parameters() if p.grad is not None}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def fit(name: str, precision: Any, **kwargs: Any) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, gradients = Observed(), Gradients()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin = precision if isinstance(precision, ShardPrecision) else ShardPrecision(precision)
        trainer = quiet_trainer(strategy=name, plugins=[plugin], max_steps=STEPS, callbacks=[gradients], **kwargs)
        trainer.fit(module, loader())
    trainable = [p for p in module.parameters() if p.requires_grad]
    slots = [v for p in trainable for v in trainer.optimizers[0].state[p].values() if v.ndim > 0]
    return {
        "parameters": whole_parameters(module),
        "masters": {p.dtype for p in trainable},
        "frozen": module.frozen.dtype,
        "buffer": module.blocks[0].scale.dtype,
        "slots": {v.dtype for v in slots},
        "gradients": gradients.dtypes,
        "forward": module.forward_dtypes,
        "backward": module.backward_dtypes,
        "output": module.output_dtypes,
        "scale": plugin.loss_scale,
        "bytes": sum(local(tensor).nbytes for tensor in [*trainable, *slots]),
        "warnings": [str(w.message) for w in caught if "is lost" in str(w.message)],
        "losses": module.losses,
    }


# DeepSpeed's optimizer steps flat partitions, and its rows are of another shape: see test_deepspeed.py.
NAMES = [name for name in registry.PRESETS if "deepspeed" not in name]
SAMPLE = [
    ("shard_ddp", "32-true"),
    ("shard_fsdp", "bf16-mixed"),
    ("shard_fsdp_hybrid_aligned", "bf16-true"),
    ("shard_ddp_aligned", "16-mixed"),
    ("shard_fsdp_offload", "16-true"),
    ("shard_fsdp_grad_op_aligned", "16-true"),
]


REST = [case for case in itertools.product(NAMES, PRECISIONS) if case not in SAMPLE]


@pytest.mark.parametrize(("name", "precision"), sampled([*SAMPLE, *REST], *range(len(SAMPLE))))
def test_the_table(name: str, precision: str) -> None:
    policy = policy_from(precision, aligned=name.endswith("_aligned"))
    ranks = run_distributed(fit, 2, name, precision)
    for run in ranks:
        assert run["masters"] == run["slots"] == run["gradients"] == {policy.master}
        assert run["forward"] == run["backward"] == {policy.compute}
        assert run["frozen"] == run["buffer"] == FP32
        assert (run["scale"] is not None) is (policy.compute == FP16 and policy.master == FP32)
        assert all(torch.isfinite(p).all() for p in run["parameters"].values())
        assert len(run["losses"]) == STEPS
    # Said once, by rank 0.
    assert [len(run["warnings"]) for run in ranks] == [int(policy.is_low_memory), 0]
    assert ranks[0]["losses"] != ranks[1]["losses"]


def _low_memory() -> list[Any]:
    low, aligned = (fit(name, "bf16-true") for name in ("shard_fsdp", "shard_fsdp_aligned"))
    differs = any(not torch.equal(p.float(), aligned["parameters"][n]) for n, p in low["parameters"].items())
    return [low["bytes"] * 2 == aligned["bytes"], differs, low["warnings"]]


def test_low_memory_takes_half_the_bytes_and_gives_other_numbers() -> None:
    (*facts, [warning]), _ = run_distributed(_low_memory, 2)
    assert facts == [True, True]
    assert "'bf16-true' steps parameters in bf16: an update smaller than about 0.004" in warning
    assert "bf16-mixed, or the strategy's _aligned name" in warning


def _words() -> list[Any]:
    """A plain run, one with outputs in bf16 and one that reduces in it."""
    plain, output, reduce = (
        fit("shard_fsdp", ShardPrecision("bf16-mixed", **words))
        for words in ({}, {"output": "bf16"}, {"reduce": "bf16"})
    )
    same = all(torch.equal(p, reduce["parameters"][n]) for n, p in plain["parameters"].items())
    return [plain["output"], output["output"], output["forward"], reduce["masters"], same]


def test_outputs_and_reductions_in_bf16() -> None:
    for found in run_distributed(_words, 2):
        assert found == [{FP32}, {BF16}, {BF16}, {FP32}, False]
