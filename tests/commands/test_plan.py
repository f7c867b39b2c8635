"""The command ``plan``: its output and its refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from torch import Tensor

from lightning_shard.commands import plan as plan_command
from lightning_shard.commands import plan_inputs
from lightning_shard.commands.cli import ShardCLI
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters.peaks import find_peaks
from lightning_shard.planning.operators import Device
from lightning_shard.planning.report import draw
from lightning_shard.planning.traffic import Links, links_text, read_links
from tests.harness import ROOT
from tests.models import TinyLM, loader

# The command


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan_command.main(["--device-memory", "80GB", *arguments]) == 0
    return capsys.readouterr().out


GPT = ["--config", str(ROOT / "tests/commands/gpt.yaml"), "--data.init_args.limit_bytes=100000"]
FAST = ["--intra-node", "450GB/s", "--inter-node", "400Gb/s", "--device-name", "NVIDIA H100 80GB HBM3"]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.matrix
def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    more = ["--trainer.precision=bf16-mixed", "--compare", "--picture", str(picture)]
    out = plan(capsys, "--nodes", "4", "--devices", "8", *FAST, *GPT, *more)
    assert "shard_fsdp, bf16-mixed, 4 x 8 devices, batch 8 per device: 131,712 parameters" in out
    assert re.search(r"^fits: .* at the peak, in the \w+ ", out, re.MULTILINE)
    assert re.search(r"^largest batch per device: \d+", out, re.MULTILINE)
    assert "fewest devices for this batch: 1 x 1" in out
    assert re.search(r"^all-gather, parameters, backward +shard +32 ", out, re.MULTILINE)
    assert "a step takes about" in out
    table = out[out.index("\nengine ") + 1 :].partition("\n\n")[0].splitlines()
    assert table[0].split() == ["engine", "peak", "fits", "batch", "step"]
    assert max(map(len, table)) <= 100
    for name in ("shard_ddp", "shard_fsdp", "  + selective checkpointing", "shard_deepspeed_stage_3_offload_nvme"):
        assert any(re.search(rf"^{re.escape(name)} .* yes ", line) for line in table), name
    assert "note:" not in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    check_yaml(out, tmp_path)


def test_averages_of_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ema = tmp_path / "ema.yaml"
    ema.write_text("trainer: {callbacks: [{class_path: lightning_shard.EMACallback, init_args: {device: cpu}}]}")
    out = plan(capsys, *GPT, "--config", str(ema), "--no-trace", "--compare", "--wide")
    assert "\nhost memory, per device " in out
    assert re.search(r"^engine +parameters +.*host +peak +fits +batch +fewest devices$", out, re.MULTILINE)


def check_yaml(out: str, folder: Path) -> None:
    """What is recommended is what the package's parser takes."""
    text = out[out.index("\ntrainer:\n") :].partition("\n\n")[0]
    content = yaml.safe_load(text)
    assert content["trainer"]["num_nodes"] == 4
    # There is no GPU to start on.
    content["trainer"] |= {"accelerator": "cpu"}
    (folder / "trainer.yaml").write_text(yaml.safe_dump(content))
    read = ShardCLI(
        args=["--config", str(ROOT / "tests/commands/gpt.yaml"), "--config", str(folder / "trainer.yaml")], run=False
    )
    assert type(read.trainer.strategy).__name__ == content["trainer"]["strategy"]["class_path"].rpartition(".")[2]


def test_without_activations(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "--devices", "2", *GPT, "--no-trace")
    assert out.startswith("note: ESTIMATE WITHOUT ACTIVATIONS: --no-trace was given")
    assert not re.search(r"^activations |^fits|^may fit", out, re.MULTILINE)
    assert re.search("^not known whether it fits: .* without activations", out, re.MULTILINE)
    assert "fewest devices for all but activations: 1 x 1" in out


class Masked(TinyLM):
    """A step that depends on its data."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = batch[0][batch[1].sum(1) > 3]
        return self(kept).sum()


class NoData(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        raise FileNotFoundError("shards/part-0.bin")


@pytest.mark.matrix
def test_estimates_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--trainer.strategy=shard_deepspeed_stage_2", "--trainer.accelerator=cpu", f"--model={__name__}.Masked"]
    out = plan(capsys, *own, f"--data={__name__}.NoData")
    assert "ESTIMATE WITHOUT ACTIVATIONS" in out
    assert "FileNotFoundError: shards/part-0.bin" in out
    assert re.search(r"operation aten\.\S*(nonzero|index)", plan(capsys, *own, f"--data={__name__}.Words"))


class Words(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transformers.LlamaConfig"], "transformers.LlamaConfig stands behind options: a model is the first word"),
        (["--device-peak", "1e12", "--device-name", "H100"], "give one of them"),
        (["--links", "links.json", "--inter-node", "50GB/s"], "--links links.json and --inter-node both say"),
        ([*GPT, "--trainer.strategy=ddp"], "trainer.strategy is 'ddp'.*--trainer.strategy shard_ddp"),
        ([*GPT, "--device-name", "abacus"], "the peak of 'abacus' is not known"),
        (["--picture", "nope/plan.png"], "nope/plan.png: there is no folder nope. Make it first"),
        (
            [*GPT, "--trainer.strategy=shard_deepspeed_stage_2", "--trainer.precision=16-true", "--no-trace"],
            "masters are fp16 with DeepSpeed stage 2.*Use shard_deepspeed_stage_2_offload",
        ),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_command.main(["--device-memory", "80GB", *arguments])


@pytest.mark.matrix
def test_a_measured_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "links.json"
    reached = {"products": 1e11, "single": 5e10, "memory": 1e10, "host": 1e10, "launch": 2e-6}
    path.write_text(links_text(Links(intra_node=1e9, inter_node=None, device=reached)))
    assert read_links(path).device == reached
    slow = plan(capsys, *GPT, "--links", str(path))
    assert re.search(r"^a step takes about .* bound by (compute|the memory's bandwidth): ", slow, re.MULTILINE)
    # A device with a name has facts that doctor can't measure.
    inputs = plan_inputs.read_inputs(GPT, 80 * 10**9)
    for name, known in (([], Device(**reached, processors=1)), (["--device-name=A100"], find_peaks("A100"))):
        options = plan_command.parser().parse_args(["--device-memory=80GB", *name])
        device = plan_command._device(options, inputs, reached)
        assert known is not None
        assert device == Device(**reached, attention=known.attention, processors=known.processors), name
    path.write_text(links_text(Links(intra_node=1e9, inter_node=None, device={"products": 1e11})))
    with pytest.raises(ConfigurationError, match=r"has no speeds of links in it \('single'\)"):
        read_links(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory.*doctor --output"),
        (
            '{"format": "links 2", "intra_node_bytes_per_second": 1, "inter_node_bytes_per_second": 1}',
            "has no speeds of links in it .its format is not 'lightning_shard links 1'",
        ),
        (links_text(Links(intra_node=0.0, inter_node=None)), "a speed is not greater than 0"),
        (links_text(Links(intra_node=450e9, inter_node=None)), "no link between nodes, and the run is on 2 x 2"),
    ],
)
def test_no_measured_links(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        plan_command.main(
            ["--device-memory=80GB", "--links", str(path), "--nodes=2", "--devices=2", *GPT, "--no-trace"]
        )


def test_a_picture_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"plan.foo can't be written: Format 'foo' is not supported"):
        draw([], 1, tmp_path / "plan.foo")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"--picture needs matplotlib.*examples"):
        plan_command.main(["--device-memory", "80GB", "--picture", "plan.png", *GPT])
