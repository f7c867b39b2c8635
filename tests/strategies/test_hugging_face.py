"""A Hugging Face model with tied embeddings, loaded in bf16: the same numbers and texts on every engine."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers.modeling_outputs import CausalLMOutput

from lightning_shard import ShardDDPStrategy, ShardDeepSpeedStrategy, ShardFSDPStrategy
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import Final, llama, quiet_trainer
from tests.strategies.indexed import Indexed, same_everywhere

Recompute = Literal["reentrant", "not reentrant", "units"] | None


class Llama(pl.LightningModule):
    """Trains, and continues texts in validation, on each rank another number of tokens."""

    def __init__(self, recompute: Recompute) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 32}
        self.model = llama(**sizes, num_attention_heads=4, num_key_value_heads=2).to(torch.bfloat16).train()
        if recompute in ("reentrant", "not reentrant"):
            self.model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        self.losses: list[float] = []
        self.texts: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        length = 5 + 2 * dist.get_rank()
        # Ranks that are done run on with the others where each forward gathers parameters: synced_gpus of transformers.
        self.texts += self.model.generate(
            batch[:, :3],
            min_new_tokens=length,
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        ).tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _strategy(engine: str, units: Any) -> Any:
    if engine == "ddp":
        return ShardDDPStrategy(aligned=True)
    if engine == "fsdp":
        return ShardFSDPStrategy(aligned=True, activation_checkpointing=units)
    return ShardDeepSpeedStrategy(aligned=True, stage=int(engine[-1]), activation_checkpointing=units)


def _train(engine: str, recompute: Recompute) -> dict[str, Any]:
    final = Final()
    trainer = quiet_trainer(
        strategy=_strategy(engine, "units" if recompute == "units" else None),
        precision="bf16-true",
        max_steps=4,
        val_check_interval=4,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[final],
    )
    model = Llama(recompute)
    data = DataLoader(torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(0)), batch_size=2)
    trainer.fit(model, data, data)
    return {"losses": model.losses, "texts": model.texts, "parameters": final.parameters}


@pytest.mark.parametrize(
    ("engine", "recompute"),
    sampled([("fsdp", "not reentrant"), ("zero_2", "units"), ("zero_3", "reentrant")], 2),
)
def test_recomputing_and_generating_are_the_same_on_every_engine(engine: str, recompute: Recompute) -> None:
    expected, found = run_distributed(_train, 2, "ddp", None), run_distributed(_train, 2, engine, recompute)
    assert expected[0]["losses"] != expected[1]["losses"]
    for rank in range(2):
        assert found[rank]["losses"] == expected[rank]["losses"]
        assert found[rank]["texts"] == expected[rank]["texts"]
        assert {len(text) for text in found[rank]["texts"]} == {8 + 2 * rank}
        for name, value in expected[rank]["parameters"].items():
            assert value.dtype == torch.float32
            assert torch.equal(found[rank]["parameters"][name], value), name


class Speech(pl.LightningModule):
    """Leaves out layers at random."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

        torch.manual_seed(3)
        sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 5}
        extractor = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
        positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        config = Wav2Vec2Config(
            num_hidden_layers=4, layerdrop=0.4, apply_spec_augment=False, **sizes, **extractor, **positions
        )
        self.model = Wav2Vec2ForSequenceClassification(config).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch, labels=torch.arange(len(batch))).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _train_speech(engine: str) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    strategy = (
        ShardDDPStrategy(aligned=True, find_unused_parameters=True) if engine == "ddp" else _strategy(engine, None)
    )
    final = Final()
    trainer = quiet_trainer(strategy=strategy, max_steps=4, callbacks=[final])
    trainer.fit(Speech(), DataLoader(torch.randn(16, 400, generator=torch.Generator().manual_seed(0)), batch_size=2))
    return final.parameters


@pytest.mark.matrix
def test_layers_are_left_out_at_random_under_fsdp_too() -> None:
    expected, found = run_distributed(_train_speech, 2, "ddp")[0], run_distributed(_train_speech, 2, "fsdp")[0]
    # Seen to differ where every layer runs, as transformers has it under FSDP.
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


class ComputesItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> CausalLMOutput:
        logits = self.layer(x)
        return CausalLMOutput(loss=logits.float().square().mean(), logits=logits, hidden_states=(x,))


class Widened(TorchDispatchMode):
    """Notes the sizes of copies in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and output.dtype == torch.float32:
            self.sizes.append(output.numel())
        return output


class ReturnsLosses(Indexed):
    """Its model returns a loss and logits, of which the step reads the accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.notes = ComputesItsLoss(), nn.Identity(), list[Any]()

    def loss(self, batch: Any, stage: str) -> Tensor:
        index, x = batch
        self._note(stage, index)
        with Widened() as widened:
            output = self.body(x)
        if stage == "train" and self.global_step == 2:
            copies = [size for size in widened.sizes if size == output.logits.numel()]
            self.notes.append((output.loss.dtype, output.logits.dtype, len(copies)))
        self.log(f"{stage}_accuracy", (output.logits.argmax(-1) == 0).float().mean(), sync_dist=True)
        return output.loss


def test_logits_that_come_with_their_loss_are_not_copied() -> None:
    found = same_everywhere(ReturnsLosses, "bf16-mixed", strategies=("ddp", "full", "zero_3"))
    # The model's own for its loss, and no other.
    assert found["notes"] == [(torch.float32, torch.bfloat16, 1)]
