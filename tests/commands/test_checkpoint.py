"""The commands ``checkpoint``: convert, export, show and verify."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard.checkpoint.files.manifest import read_manifest
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.foreign.test_export import read_safetensors

# The command line


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run ``lightning-shard checkpoint ...`` in the temporary folder; its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[Any, str, str]:
        from lightning_shard import ShardCLI

        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            ShardCLI(args=["checkpoint", *arguments], environ={})
        return (ended.value.code, *capsys.readouterr())

    return run


@pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "."], ". is not a checkpoint"),
        (["verify", "a" * 300], "File name too long"),
        (["convert", "{0}", "file/one.ckpt"], "/file: File exists"),
        (["export", "{0}", "file/out"], "file/out: Not a directory"),
        (["clean", "nothing"], "'nothing' is no folder"),
    ],
)
def test_paths_that_can_not_be_used_are_said_in_a_line(
    command: Any, trained: Path, arguments: list[str], says: str
) -> None:
    Path("file").touch()
    before = sorted(Path().rglob("*"))
    code, out, error = command(*(argument.format(trained) for argument in arguments))
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert says in error
    assert sorted(Path().rglob("*")) == before


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:LightningCLI.s args parameter")
def test_commands(command: Any, trained: Path) -> None:
    code, text, _ = command("inspect", "trained.ckpt")
    assert (code, "model.embed.weight" in text) == (0, True)
    assert command("verify", "trained.ckpt")[:2] == (0, "trained.ckpt is whole: 5 files checked\n")
    assert command("convert", "trained.ckpt", "full.ckpt")[0] == 0
    assert command("verify", "full.ckpt")[:2] == (0, "full.ckpt is whole: 1 file checked\n")
    assert command("convert", "full.ckpt", "back.ckpt")[0] == 0
    assert_equal(stored(Path("back.ckpt")), stored(trained))
    assert command("convert", "full.ckpt", "weights.ckpt", "--weights_only")[0] == 0
    assert not [key for key in read_manifest("weights.ckpt").tensors if key.startswith("optimizer.")]
    assert (
        command("export", "full.ckpt", "out", "--dtype", "bf16", "--module", "body", "--max_shard_size", "1KB")[0] == 0
    )
    assert {t.dtype for t in read_safetensors(Path("out")).values()} == {torch.bfloat16}

    for arguments, said in {
        ("inspect", "nothing"): "there is no checkpoint at nothing",
        ("inspect", "memory://a/b.ckpt"): "there is no checkpoint at memory:///a/b.ckpt",
        ("verify", "gs://a/b.ckpt"): "pip install gcsfs",
        ("convert", "trained.ckpt", "memory://b.ckpt"): "memory://b.ckpt is of an object store",
        ("export", "trained.ckpt", "memory://new"): "memory://new is of an object store",
        ("verify", "nothing"): "there is no checkpoint at nothing",
        ("convert", "trained.ckpt", "full.ckpt"): "full.ckpt exists",
        ("export", "trained.ckpt", "new", "--max_shard_size", "big"): "'big' is no size",
        ("export", "trained.ckpt", "new", "--module", "tail"): "there is no tensor of 'tail'",
        ("export", "trained.ckpt", "new", "--dtype", "fp8"): "dtype: invalid choice: 'fp8'",
    }.items():
        code, output, error = command(*arguments)
        assert (code, output) == (2, "")
        assert error.count("error: ") == 1
        assert said in error
    Path(".x.ckpt.tmp-0123456789ab").mkdir()
    assert command("clean", ".")[:2] == (0, ".x.ckpt.tmp-0123456789ab left behind (--remove removes it)\n")
    assert command("clean", ".", "--remove")[:2] == (0, ".x.ckpt.tmp-0123456789ab removed\n")
    assert command("clean", ".")[:2] == (0, "nothing is left behind in .\n")
    assert command("convert", "trained.ckpt", "memory://b.ckpt", "--form", "portable")[0] == 0
    assert command("verify", "memory://b.ckpt")[:2] == (0, "memory://b.ckpt is whole: 5 files checked\n")
    assert command("clean", "memory://")[:2] == (0, "nothing is left behind in memory://\n")
    (trained / "trainer.pt").write_bytes(b"")
    code, _, error = command("verify", "trained.ckpt")
    assert code == 2
    assert "trained.ckpt is damaged: trainer.pt" in error
