"""Every configuration that is there to be copied runs: two steps, with the sizes made tiny."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_shard import ShardCLI
from lightning_shard.precision.policy import short
from tests.groups import sampled
from tests.harness import ROOT, run_distributed

CONFIGS = ROOT / "configs"
TINY_GPT = {
    "--model.init_args.layers": "2",
    "--model.init_args.heads": "2",
    "--model.init_args.width": "8",
    "--model.init_args.max_length": "16",
    "--data.init_args.seq_len": "16",
    "--data.init_args.batch_size": "2",
    "--data.init_args.limit_bytes": "4000",
}
SHORT = {
    "--trainer.accelerator": "cpu",
    "--trainer.num_nodes": "1",
    "--trainer.max_steps": "2",
    "--trainer.accumulate_grad_batches": "1",
    "--trainer.val_check_interval": "2",
    "--trainer.limit_val_batches": "1",
    "--trainer.num_sanity_val_steps": "0",
    "--trainer.enable_model_summary": "false",
}


def _fit(config: str, changes: dict[str, str]) -> dict[str, Any]:
    """On each rank: what came of ``lightning-shard fit`` with this file."""
    cli = ShardCLI(args=["fit", "--config", config, *(f"{key}={value}" for key, value in (SHORT | changes).items())])
    strategy, callback = cli.trainer.strategy, cli.trainer.checkpoint_callback
    return {
        "steps": cli.trainer.global_step,
        "strategy": type(strategy).__name__,
        "aligned": strategy.aligned,
        "compute": short(strategy.policy.compute),
        "mesh": [strategy.device_mesh[axis].size() for axis in ("replicate", "shard")],
        "checkpoint": os.path.exists(callback.best_model_path),
        "score": float(callback.best_model_score),
    }


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face model with its tokenizer, of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("weights")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "ranks", "mesh"), sampled([("hybrid", 2, [1, 2]), ("quickstart", 2, [1, 2]), ("offload", 1, [1, 1])], 0)
)
def test_a_configuration_runs(name: str, ranks: int, mesh: list[int]) -> None:
    changes = {**TINY_GPT, "--trainer.devices": str(ranks)}
    results = run_distributed(_fit, ranks, str(CONFIGS / f"{name}.yaml"), changes)
    assert results == [results[0]] * ranks
    result = results[0]
    assert 1 < result.pop("score") < 400  # an untrained model guesses among 256 bytes
    assert result == {
        "steps": 2,
        "strategy": "ShardFSDPStrategy",
        "aligned": True,
        "compute": "fp32" if name == "quickstart" else "bf16",
        "mesh": mesh,
        "checkpoint": True,
    }


@pytest.mark.matrix
def test_models_of_hugging_face_run(weights: Path, encoder: Path) -> None:
    folders = {"hugging_face": ("weights", weights), "classifier": ("encoder", encoder)}
    sizes = {"hugging_face": {"seq_len": "16", "limit_bytes": "4000"}, "classifier": {"limit": "64", "batch_size": "4"}}
    for name, (key, folder) in folders.items():
        changes = {f"--{part}.init_args.{key}": str(folder) for part in ("model", "data")}
        changes |= {f"--data.init_args.{option}": value for option, value in sizes[name].items()}
        results = run_distributed(_fit, 2, str(CONFIGS / f"{name}.yaml"), {**changes, "--trainer.devices": "2"})
        assert results[0] == results[1]
        assert (results[0]["steps"], results[0]["checkpoint"]) == (2, True)


def test_readme_names_every_file_that_is_there() -> None:
    text = (CONFIGS / "README.md").read_text()
    files = {path.name for path in CONFIGS.glob("*.yaml")}
    assert files == {"quickstart.yaml", "hugging_face.yaml", "hybrid.yaml", "offload.yaml", "classifier.yaml"}
    assert [name for name in files if f"]({name})" not in text] == []
