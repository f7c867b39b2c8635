"""A path that ends in ``.hf.ckpt``: a folder that ``from_pretrained`` opens, saved from training on every engine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.files import commit
from lightning_shard.checkpoint.files.manifest import Contents, Facts
from lightning_shard.checkpoint.foreign import hugging_face_folders
from lightning_shard.checkpoint.inspect import verify
from lightning_shard.checkpoint.load import open_checkpoint, open_newest, open_portable
from lightning_shard.checkpoint.save import prepare_save, training_state
from lightning_shard.checkpoint.save_plan import SavePlanner, live_values
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.registry import build
from tests.checkpoint.compare import stored
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import VOCAB, llama, quiet_trainer

pytest.importorskip("transformers")
pytest.importorskip("peft")

ENGINES = ["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_2", "shard_deepspeed_stage_3"]
TEMPLATES = {"default": "D {{ messages }}", "tool_use": "T {{ messages }}"}
"""Transformers keeps all but the first in a folder."""
TOKENS = torch.randint(0, VOCAB, (64, 8), generator=torch.Generator().manual_seed(5))


def tokenizer(folder: Path) -> Any:
    """A tokenizer of a few words."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "a": 1, "b": 2}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    empty = {"truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None}
    text = {"version": "1.0", **empty, "pre_tokenizer": {"type": "Whitespace"}, "decoder": None, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    words = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), unk_token="[UNK]")
    words.chat_template = TEMPLATES
    return words


class Llama(pl.LightningModule):
    """A tiny Llama with tied embeddings, and its tokenizer."""

    def __init__(self, words: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = llama()
        self.words = words

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(module: pl.LightningModule, strategy: Any, **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(strategy=strategy, enable_checkpointing=True, **{"max_steps": 4, **options})
    trainer.fit(module, DataLoader(TOKENS, batch_size=2))
    return trainer


def save(strategy: Any, folder: str) -> None:
    """Save twice, of which one stays, and the same as a portable directory; the second time over the first."""
    words = tokenizer(Path(folder)) if torch.distributed.get_rank() == 0 else None
    each = ModelCheckpoint(folder, "{step}.hf", every_n_train_steps=2, save_top_k=1, monitor="step", mode="max")
    same = ModelCheckpoint(folder, "same.hf", every_n_train_steps=2, enable_version_counter=False)
    trainer = fit(Llama(words), strategy, callbacks=[each, same], precision="bf16-mixed")
    trainer.save_checkpoint(f"{folder}/portable.ckpt")


def check(folder: Path) -> None:
    """The folders open with the values of the portable directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert sorted(p.name for p in folder.glob("*.ckpt")) == ["portable.ckpt", "same.hf.ckpt", "step=4.hf.ckpt"]
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    expected = {k.removeprefix("model.model."): v for k, v in stored(folder / "portable.ckpt").items()}
    for name in ("same.hf.ckpt", "step=4.hf.ckpt"):
        found = AutoModelForCausalLM.from_pretrained(folder / name)
        assert found.lm_head.weight is found.model.embed_tokens.weight
        for key, value in found.state_dict().items():
            assert value.dtype == torch.float32  # The master weights are.
            assert torch.equal(value, expected[key if key in expected else "model.embed_tokens.weight"]), key
        words = AutoTokenizer.from_pretrained(folder / name)
        assert words("b a")["input_ids"] == [2, 1]
        assert words.chat_template == TEMPLATES
        files = verify(folder / name)
        assert {"config.json", "model.safetensors", "generation_config.json"} < set(files)
        assert [file for file in files if "/" in file] == ["additional_chat_templates/tool_use.jinja"]


@pytest.mark.parametrize("strategy", sampled(ENGINES, 1))
def test_a_path_that_ends_in_hf_is_opened_by_from_pretrained(tmp_path: Path, strategy: str) -> None:
    run_distributed(save, 2, strategy, str(tmp_path))
    check(tmp_path)


class Prompts(Llama):
    """A prompt is trained, which PEFT computes when it saves."""

    def __init__(self) -> None:
        import peft

        super().__init__()
        config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(self.model, config)


def test_modules_of_other_than_one_model_are_refused(tmp_path: Path) -> None:
    two, path = Llama(), tmp_path / "a.hf.ckpt"
    two.teacher = llama()
    with pytest.raises(CheckpointError, match="Llama has model, teacher of transformers or PEFT"):
        fit(two, "shard_ddp", callbacks=[ModelCheckpoint(tmp_path, "{step}.hf")])
    with pytest.raises(CheckpointError, match="model has prompts, which PEFT computes, and"):
        begin_and_finish(Prompts(), path)
    assert os.listdir(tmp_path) == []
    begin_and_finish(Llama(), path)
    with pytest.raises(CheckpointError, match=r"a\.hf\.ckpt is in Hugging Face's layout and has weights alone"):
        open_checkpoint(path)


def test_files_of_a_save_are_told_from_others(tmp_path: Path) -> None:
    path = tmp_path / "a.hf.ckpt"
    begin_and_finish(Llama(), path)
    (path / "mine.txt").write_text("mine")
    commit.remove_checkpoint(path)
    assert [entry.name for entry in path.iterdir()] == ["mine.txt"]
    with pytest.raises(CheckpointError, match="files that no checkpoint has"):
        begin_and_finish(Llama(), path)
    shutil.rmtree(path)
    # A kill leaves the folder without its manifest; the next save to the path removes it.
    killed = tmp_path / ".a.hf.ckpt.tmp-0123456789ab"
    killed.mkdir()
    (killed / "config.json").write_text("{}")
    begin_and_finish(Llama(), path)
    assert os.listdir(tmp_path) == ["a.hf.ckpt"]
    with (path / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"!")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not match its checksum"):
        verify(path)


def test_auto_passes_over_a_newer_folder_that_nothing_resumes_from(tmp_path: Path) -> None:
    for step, name in enumerate(["1.ckpt", "2.hf.ckpt"]):
        begin_and_finish(Llama(), tmp_path / name, {"name": "mine", "step": step, "time": 0.0})
    found = open_newest([tmp_path], "mine")
    assert found.newest is not None
    assert found.newest.path.name == "1.ckpt"
    assert found.broken == ()


def begin_and_finish(module: Llama, path: Path, run: Any = None) -> None:
    """A save in one process, without a run."""

    def collect() -> Contents:
        facts = Facts(engine="none", policy="none", run=run or {})
        return training_state(module=module, optimizers=[], trainer_state={}, facts=facts)

    pending = prepare_save(
        Ranks.of(), str(path), collect, SavePlanner(), lambda: hugging_face_folders.make_skeleton(module, [module])
    )
    pending.write(Ranks.of(), live_values(pending.contents.tensors))


def save_many_files(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hugging_face_folders, "_MOST_BYTES", 1500)
        begin_and_finish(Llama(), path)


def test_many_files_that_several_ranks_write_have_an_index(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    path = tmp_path / "a.hf.ckpt"
    run_distributed(save_many_files, 2, path)
    assert len(list(path.glob("model-*.safetensors"))) > 2
    assert len(verify(path)) > 5
    assert os.listdir(tmp_path) == [path.name]
    found = LlamaForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(value, found[key]) for key, value in Llama().model.state_dict().items())


class Adapters(Llama):
    """LoRA on a frozen bf16 base, which ``seed`` makes."""

    def __init__(self, seed: int = 3) -> None:
        import peft

        super().__init__()
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(4)
        self.model = peft.get_peft_model(base(seed), config, autocast_adapter_dtype=False)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


def base(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return llama().to(torch.bfloat16)


def adapt(folder: str, names: list[str]) -> None:
    """Each engine trains, saves adapters alone, and goes on from what another one saved; another base is refused."""
    for name in names:
        here = f"{folder}/{name}"
        end = ModelCheckpoint(here, "{step}.hf", every_n_train_steps=2, save_top_k=-1)
        half = ModelCheckpoint(here, "{step}", every_n_train_steps=2, save_top_k=-1, monitor="step")
        fit(Adapters(), strategy(name), precision="bf16-mixed", callbacks=[half, end])
    for name, before in zip(names, [names[-1], *names[:-1]], strict=True):
        again = ModelCheckpoint(f"{folder}/{name}", "again.hf", every_n_train_steps=4)
        trainer = quiet_trainer(
            strategy=strategy(name), enable_checkpointing=True, max_steps=4, callbacks=[again], precision="bf16-mixed"
        )
        data = DataLoader(TOKENS, batch_size=2)
        trainer.fit(Adapters(), data, ckpt_path=f"{folder}/{before}/step=2.ckpt")
        with pytest.raises(CheckpointError, match=r"here are others of .*: load the same ones first"):
            quiet_trainer(strategy=strategy(name), precision="bf16-mixed").validate(
                Adapters(5), data, ckpt_path=f"{folder}/{before}/step=2.ckpt", verbose=False
            )


def strategy(name: str) -> Any:
    return build(f"{name}_aligned", save_frozen=False, async_save="fsdp" in name)


def check_adapters(folder: Path, names: list[str]) -> None:
    """Adapters are equal on all engines, resumed and not. They open, and the base is in no checkpoint."""
    from peft import PeftModel
    from safetensors.torch import load_file

    first = load_file(folder / names[0] / "step=4.hf.ckpt" / "adapter_model.safetensors")
    assert len(first) == 8
    for name in names:
        for path in (folder / name / "step=4.hf.ckpt", folder / name / "again.hf.ckpt"):
            found = load_file(path / "adapter_model.safetensors")
            assert found.keys() == first.keys()
            assert all(torch.equal(value, first[key]) for key, value in found.items()), path
            assert "model.safetensors" not in verify(path)
        saved = open_portable(folder / name / "step=2.ckpt")
        assert all(".lora_" in key for key in saved.tensors)
        assert saved.facts.frozen == open_portable(folder / names[0] / "step=2.ckpt").facts.frozen != {}
    opened = PeftModel.from_pretrained(base(), folder / names[0] / "step=4.hf.ckpt")
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    found = opened.get_submodule(layer).lora_B["default"].weight
    assert torch.equal(found, first[f"{layer}.lora_B.weight"].to(found.dtype))


@pytest.mark.parametrize(
    "names", [["shard_ddp", "shard_fsdp"], pytest.param(ENGINES, marks=pytest.mark.matrix, id="all")]
)
def test_adapters_are_saved_alone_and_resumed_on_another_engine(tmp_path: Path, names: list[str]) -> None:
    run_distributed(adapt, 2, str(tmp_path), names, timeout=300)
    check_adapters(tmp_path, names)
