"""Every row of the precision table under every name: the dtypes that were seen, and the bytes that they take."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ShardPrecision, registry
from lightning_shard.precision.policy import policy_from
from lightning_shard.precision.words import PRECISIONS
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
        "parameter_bytes": sum(local(p).nbytes for p in trainable),
        "slot_bytes": sum(local(v).nbytes for v in slots),
        "warnings": [str(w.message) for w in caught if "is lost" in str(w.message)],
        "losses": module.losses,
    }


def check_row(name: str, precision: str) -> None:
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


def test_the_sample_has_each_row_and_each_class() -> None:
    assert {precision for _, precision in SAMPLE} == set(PRECISIONS)
    assert {registry.PRESETS[n].class_path for n, _ in SAMPLE} == {registry.PRESETS[n].class_path for n in NAMES}


@pytest.mark.parametrize(("name", "precision"), SAMPLE)
def test_a_sample_of_the_table(name: str, precision: str) -> None:
    check_row(name, precision)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_the_table(name: str, precision: str) -> None:
    check_row(name, precision)


@pytest.mark.parametrize(("engine", "share"), [("shard_ddp", 1), ("shard_fsdp", 2)])
def test_low_memory_takes_half_the_bytes_and_gives_other_numbers(engine: str, share: int) -> None:
    low = run_distributed(fit, 2, engine, "bf16-true")
    aligned = run_distributed(fit, 2, f"{engine}_aligned", "bf16-true")
    for one, other in zip(low, aligned, strict=True):
        assert one["parameter_bytes"] * 2 == other["parameter_bytes"]
        assert one["slot_bytes"] * 2 == other["slot_bytes"] == 2 * other["parameter_bytes"]
        # All of them move: in bf16 by steps that bf16 can hold.
        assert any(not torch.equal(p.float(), other["parameters"][n]) for n, p in one["parameters"].items())
    module = Observed()
    module.configure_model()
    elements = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert sum(run["parameter_bytes"] for run in low) == 2 * elements * 2 // share
    [warning] = low[0]["warnings"]
    assert "'bf16-true' steps parameters in bf16: an update smaller than about 0.004" in warning
    assert "bf16-mixed, or the strategy's _aligned name" in warning


def _stand_still(name: str) -> tuple[bool, bool]:
    """Whether updates of 2**-10 move weights of 1."""
    trainer = quiet_trainer(strategy=name, precision="bf16-true", max_steps=STEPS)
    module = Slow()
    trainer.fit(module, loader())
    return module.layer.weight.eq(1.0).all().item(), module.layer.weight.lt(1.0).all().item()


class Slow(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(1, 4)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2.0**-10)


def test_what_the_low_memory_form_loses() -> None:
    # 1 - 2**-10 lies closer to 1 than to bf16's next number below it, 1 - 2**-8.
    assert run_distributed(_stand_still, 2, "shard_ddp") == [(True, False)] * 2
    assert run_distributed(_stand_still, 2, "shard_ddp_aligned") == [(False, True)] * 2


def _default_optimizer() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(strategy="shard_fsdp", precision="16-true", max_steps=1).fit(TinyLM(), loader())
    return [str(w.message) for w in caught if "is lost" in str(w.message)]


def test_the_fp16_form_is_warned_of_eps() -> None:
    [warning] = run_distributed(_default_optimizer, 2)[0]
    assert "fp16 gradients can't be scaled" in warning
    assert "eps of 1e-8" in warning


def _fit_output(name: str) -> list[Any]:
    narrow, wide = (fit(name, ShardPrecision("bf16-mixed", output=output)) for output in ("bf16", None))
    return [narrow["output"], wide["output"], narrow["forward"], wide["forward"]]


def test_output_is_what_user_code_is_given() -> None:
    for result in run_distributed(_fit_output, 2, "shard_fsdp"):
        assert result == [{BF16}, {FP32}, {BF16}, {BF16}]


def _fit_reduce(name: str) -> tuple[set[torch.dtype], bool]:
    plain, narrow = (fit(name, ShardPrecision("bf16-mixed", reduce=reduce)) for reduce in ("fp32", "bf16"))
    same = all(torch.equal(p, narrow["parameters"][n]) for n, p in plain["parameters"].items())
    return narrow["masters"], same


@pytest.mark.parametrize("name", ["shard_ddp", "shard_fsdp"])
def test_reduce_in_bf16_gives_other_numbers(name: str) -> None:
    assert run_distributed(_fit_reduce, 2, name) == [({FP32}, False)] * 2
