"""The portable directory, the one-file form and safetensors, one into the other, one tensor at a time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lightning_shard.checkpoint.archive import materialize, read_archive, write_archive
from lightning_shard.checkpoint.collect import OPTIMIZER_STATES
from lightning_shard.checkpoint.export import export
from lightning_shard.checkpoint.forms import open_any
from lightning_shard.checkpoint.full import names_full, write_full
from lightning_shard.checkpoint.inspect import describe, verify
from lightning_shard.checkpoint.load import load_tensors, read_manifest
from lightning_shard.checkpoint.save import CheckpointInfo, save, save_training_state
from lightning_shard.checkpoint.stored import StoredTensor, open_portable, write_portable
from lightning_shard.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from tests.checkpoint.hostile import Hostile, nothing_ran  # noqa: F401, for every test here
from tests.checkpoint.test_roundtrip import bits, build, odd_tensors, save_trained, step
from tests.harness import ROOT, run_distributed

INFO = CheckpointInfo(engine="test", policy="fp32", ledger={"tensors": []})


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint of a small trained module with tied, frozen, empty and scalar tensors."""
    net, optimizer = build("plain", 0)
    step(net, optimizer)
    state = {"epoch": 3, "global_step": 2, "loops": {"fit_loop": {"state_dict": {"combined_loader": [{"at": 5}]}}}}
    path = tmp_path / "trained.ckpt"
    save_training_state(path, module=net, optimizers=[optimizer], trainer_state=state, info=INFO)
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {key: tensor.read() for key, tensor in open_any(path).tensors.items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype, key
        assert tensor.shape == other[key].shape, key
        assert bits(tensor) == bits(other[key]), key


# torch.save's format, tensor by tensor


def stored(tensor: Tensor) -> StoredTensor:
    return StoredTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, read=tensor.contiguous)


def test_torch_reads_what_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    values = odd_tensors(0, cut=False) | {
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "u16": torch.tensor([1, 2**16 - 1], dtype=torch.uint16),
    }
    tree = {key: stored(tensor) for key, tensor in values.items()}
    rest = {"list": [1, (2.5, "a", None, True)], "ordered": OrderedDict(b=1), "plain": torch.randn(3, 2).t()}
    path = tmp_path / "a.ckpt"
    write_archive(path, {**tree, **rest, "tied": tree["model.rows"]})
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert_equal({key: found[key] for key in values}, {k: v.contiguous() for k, v in values.items()})
        assert found["tied"].data_ptr() == found["model.rows"].data_ptr()
        assert torch.equal(found["plain"], rest["plain"])
        assert (found["list"], found["ordered"]) == (rest["list"], rest["ordered"])
        assert all(found[key].data_ptr() % 64 == 0 for key in values if values[key].numel()), "aligned for mmap"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_what_torch_wrote_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    values = odd_tensors(0, cut=False)
    base = torch.randn(6, 4)
    values |= {"base": base, "view": base[2:4, 1:3], "turned": base.t(), "parameter": torch.nn.Parameter(base)}
    torch.save({**values, "nested": [{"x": (1, torch.ones(2))}]}, tmp_path / "a.pt")
    tree = read_archive(tmp_path / "a.pt")
    assert all(isinstance(tree[key], StoredTensor) for key in values)
    found = materialize(tree)
    assert_equal({k: found[k] for k in values}, {k: v.detach().contiguous() for k, v in values.items()})
    assert found["nested"][0]["x"][1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("value", "named"), [(Hostile(), "tests.checkpoint.hostile.ran"), (Path("/x"), "pathlib")])
def test_a_file_that_names_anything_else_is_refused_by_that_name(tmp_path: Path, value: Any, named: str) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "callbacks": {"x": value}}, path)
    with pytest.raises(CheckpointCorruptError, match=rf"a\.ckpt names {re.escape(named)}.*nothing in it ran"):
        open_any(path)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02N.", b"no checkpoint"])
def test_a_file_that_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.ckpt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a\.ckpt is no file of torch\.save"):
        open_any(tmp_path / "a.ckpt")
    torch.save([1], tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="there is no state_dict in it"):
        open_any(tmp_path / "b.ckpt")


# The full form


@pytest.mark.parametrize(
    ("path", "full"),
    [
        ("runs/last.full.ckpt", True),
        ("epoch=0-step=2.full-v1.ckpt", True),  # as ModelCheckpoint calls a second one of the same name
        ("epoch=0-step=2.full-v12.ckpt", True),
        ("full.ckpt", False),
        ("a.fuller.ckpt", False),
        ("a.full.ckpt/model.ckpt", False),
    ],
)
def test_the_name_says_the_form(path: str, full: bool) -> None:
    assert names_full(path) is full


def test_full_and_back_is_bitwise_the_same(tmp_path: Path, trained: Path) -> None:
    write_full(tmp_path / "full.ckpt", open_any(trained))
    write_portable(tmp_path / "back.ckpt", open_any(tmp_path / "full.ckpt"))
    assert_equal(tensors_of(tmp_path / "back.ckpt"), tensors_of(trained))
    before, after = open_portable(trained), open_portable(tmp_path / "back.ckpt")
    assert after.aliases == before.aliases == {"model.head.weight": "model.embed.weight"}
    assert (after.engine, after.policy, after.ledger) == (before.engine, before.policy, before.ledger)
    # Positions of loaders are kept by rank, in a part of their own that this checkpoint does not have.
    assert before.trainer_state["loops"]["fit_loop"]["state_dict"].pop("combined_loader") == [{"at": 5}]
    assert after.trainer_state["loops"]["fit_loop"]["state_dict"].pop("combined_loader") == []
    assert after.trainer_state == before.trainer_state


def test_the_full_form_is_what_torch_would_have_saved(tmp_path: Path, trained: Path) -> None:
    """The module and the optimizer themselves, trained in the same way, give these dictionaries."""
    write_full(tmp_path / "full.ckpt", open_any(trained))
    found = torch.load(tmp_path / "full.ckpt", weights_only=True)
    net, optimizer = build("plain", 0)
    step(net, optimizer)
    assert_equal(found["state_dict"], net.state_dict())
    (state,) = found["optimizer_states"]
    expected = optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, slots in expected["state"].items():
        assert_equal(state["state"][number], slots)


def test_a_sharded_checkpoint_becomes_one_file(tmp_path: Path) -> None:
    path = tmp_path / "sharded.ckpt"
    written = run_distributed(save_trained, 2, str(path), "fsdp-2")[0]
    write_full(tmp_path / "full.ckpt", open_any(path))
    assert_equal(tensors_of(tmp_path / "full.ckpt"), written)


def test_stock_optimizer_state_needs_names(tmp_path: Path) -> None:
    net, optimizer = build("plain", 0)
    step(net, optimizer)
    torch.save({"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"a\.ckpt numbers the parameters .* ckpt_path="):
        open_any(tmp_path / "a.ckpt")
    weights = open_any(tmp_path / "a.ckpt", optimizers="none")
    assert OPTIMIZER_STATES not in weights.trainer_state
    assert weights.aliases == {"model.head.weight": "model.embed.weight"}
    assert_equal(
        {key.removeprefix("model."): tensor.read() for key, tensor in weights.tensors.items()},
        {key: tensor for key, tensor in net.state_dict().items() if key != "head.weight"},
    )
    assert "optimizer.0.#0.exp_avg" in open_any(tmp_path / "a.ckpt", optimizers="numbered").tensors


def test_a_full_file_replaces_what_is_there_only_when_it_is_whole(tmp_path: Path, trained: Path) -> None:
    target = tmp_path / "full.ckpt"
    write_full(target, open_any(trained))
    before = target.read_bytes()
    checkpoint = open_any(trained)
    (trained / "__0_0.distcp").unlink()
    with pytest.raises(FileNotFoundError):
        write_full(target, checkpoint)
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["full.ckpt", "trained.ckpt"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="files that no checkpoint has"):
        write_full(tmp_path / "folder", checkpoint)


# Safetensors


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 not a mapping
    return found


def test_export_is_read_by_the_library(tmp_path: Path, trained: Path) -> None:
    files = export(open_any(trained), tmp_path / "out")
    assert [file.name for file in files] == ["model.safetensors"]
    weights = {k.removeprefix("model."): t for k, t in tensors_of(trained).items() if k.startswith("model.")}
    assert_equal(read_safetensors(tmp_path / "out"), weights)
    with pytest.raises(CheckpointError, match=r"has model\.safetensors of an earlier export"):
        export(open_any(trained), tmp_path / "out")


def test_export_in_shards_with_an_index(tmp_path: Path, trained: Path) -> None:
    files = export(open_any(trained), tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=64)
    weights = {k.removeprefix("model."): t for k, t in tensors_of(trained).items() if k.startswith("model.")}
    found = read_safetensors(tmp_path / "out")
    assert_equal(found, {key: tensor.to(torch.bfloat16) for key, tensor in weights.items()})
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert index["weight_map"].keys() == found.keys()
    for name in {*index["weight_map"].values()}:
        with safe_open(tmp_path / "out" / name, "pt") as opened:
            keys = [*opened.keys()]
            assert keys == sorted(key for key, file in index["weight_map"].items() if file == name)
            assert sum(found[key].nbytes for key in keys) <= 64 or len(keys) == 1
    assert len(files) > 3
    assert {file.name for file in files} == {*index["weight_map"].values(), "model.safetensors.index.json"}


def test_export_of_a_submodule_has_its_names(tmp_path: Path, trained: Path) -> None:
    export(open_any(trained), tmp_path / "head", module="head")
    found = read_safetensors(tmp_path / "head")
    assert torch.equal(found["weight"], tensors_of(trained)["model.embed.weight"]), "tied to one outside of it"
    assert found.keys() == {"weight", "bias"}
    with pytest.raises(CheckpointMismatchError, match="no tensor of 'tail'; the module has body, count, embed"):
        export(open_any(trained), tmp_path / "tail", module="tail")


def test_a_dtype_that_safetensors_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, tensors={"model.c": torch.ones(2, dtype=torch.complex64)}, trainer_state={}, info=INFO)
    with pytest.raises(CheckpointError, match="no dtype for complex64"):
        export(open_any(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Memory

MEASURE = """
import re, sys, torch
from pathlib import Path
from lightning_shard.checkpoint.export import export
from lightning_shard.checkpoint.forms import open_any
from lightning_shard.checkpoint.full import write_full
from lightning_shard.checkpoint.save import CheckpointInfo, save
from lightning_shard.checkpoint.stored import write_portable

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def growth(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    work()
    print(status("VmHWM") - before)

torch.set_num_threads(1)
tensors = {f"model.w{i}": torch.full((1024, 1024), float(i)) for i in range(32)}
save("a.ckpt", tensors=tensors, trainer_state={}, info=CheckpointInfo(engine="test", policy="fp32"))
del tensors
growth(lambda: write_full("full.ckpt", open_any("a.ckpt")))
growth(lambda: write_portable("back.ckpt", open_any("full.ckpt")))
growth(lambda: export(open_any("back.ckpt"), "out", dtype=torch.bfloat16, max_shard_bytes=50_000_000))
growth(lambda: torch.load("full.ckpt", weights_only=True))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """32 tensors of 4 MiB: each conversion holds a stored box, the tensor made of it and its copy at most."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    full, back, exported, whole = map(int, run.stdout.split())
    # Memory that the earlier steps gave back to malloc, not to the system, is not counted again.
    assert whole > 24 * 2**22, "the whole at once is seen as such"
    # Three tensors, their bytes on the way from and to the files, and what Python allocates for the first time.
    assert max(full, back, exported) < 8 * 2**22


# Inspecting and verifying


def test_describe_names_what_is_there(trained: Path) -> None:
    text = describe(trained, open_any(trained))
    for part in (
        "test on 1 process",
        "epoch 3, step 2",
        "AdamW",
        "dtypes as measured: not recorded",
        "model.frozen                          3x5                         bfloat16  30",
        "model.count                           scalar",
        "model.head.weight                     tied to model.embed.weight",
        "9 tensors of the model with 96 elements, 18 of optimizers; 1,018 bytes",
    ):
        assert part in text, part


def test_describe_summarises_the_ledger(tmp_path: Path) -> None:
    rows = [{"what": "trainable", "count": 3, "first": "w", "dtypes": {"loaded": "bfloat16", "step": "float32"}}]
    info = CheckpointInfo(engine="fsdp", policy="p", ledger={"tensors": rows, "reduction": ["float32"]})
    save(tmp_path / "a.ckpt", tensors={"model.w": torch.ones(2)}, trainer_state={}, info=info)
    text = describe("a", open_any(tmp_path / "a.ckpt"))
    assert "dtypes, as measured  count  loaded    step\ntrainable            3      bfloat16  float32" in text
    assert "gradients reduced in: float32" in text


def test_verify_names_every_damaged_file(trained: Path) -> None:
    assert verify(trained) == [".metadata", "__0_0.distcp", "trainer.pt", "manifest.json"]
    for name in (".metadata", "trainer.pt"):
        data = bytearray((trained / name).read_bytes())
        data[len(data) // 2] ^= 1
        (trained / name).write_bytes(data)
    (trained / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointCorruptError) as raised:
        verify(trained)
    first, *lines, _ = str(raised.value).splitlines()
    assert first.endswith("is damaged: .metadata, __0_0.distcp, trainer.pt")
    assert len(lines) == 3


def test_verify_finds_each_flipped_and_missing_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, tensors={"model.w": torch.ones(3)}, trainer_state={"epoch": 1}, info=INFO)
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        for position in [*range(0, len(original), 37), len(original) - 1]:
            damaged = bytearray(original)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=re.escape(file.name)):
                verify(path)
        for length in (0, 1, len(original) // 2, len(original) - 1):
            file.write_bytes(original[:length])
            with pytest.raises(CheckpointError, match=re.escape(file.name)):
                verify(path)
        file.write_bytes(original)
    assert len(verify(path)) == 4


def test_verify_of_one_file_checks_its_records(tmp_path: Path, trained: Path) -> None:
    path = tmp_path / "full.ckpt"
    write_full(path, open_any(trained))
    assert verify(path) == ["full.ckpt"]
    original = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = [info for info in archive.infolist() if info.file_size]
        starts = [info.header_offset + 30 + len(info.filename) + 20 + 4 for info in records]
    for info, start in zip(records, starts, strict=True):
        damaged = bytearray(original)
        damaged[start + -start % 64] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match=rf"full\.ckpt is damaged: .*{re.escape(info.filename)}"):
            verify(path)
    for length in (0, 100, len(original) // 2, len(original) - 1):
        path.write_bytes(original[:length])
        with pytest.raises(CheckpointCorruptError, match=r"full\.ckpt is damaged"):
            verify(path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for look in (verify, open_any):
        with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint at"):
            look(tmp_path / "nothing")
        with pytest.raises(CheckpointNotFoundError, match="is not a checkpoint"):
            look(tmp_path)


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


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:LightningCLI.s args parameter")
def test_commands(command: Any, trained: Path) -> None:
    code, text, _ = command("inspect", "trained.ckpt")
    assert (code, "model.embed.weight" in text) == (0, True)
    assert command("verify", "trained.ckpt")[:2] == (0, "trained.ckpt is whole: 4 files checked\n")
    assert command("convert", "trained.ckpt", "full.ckpt")[0] == 0
    assert command("verify", "full.ckpt")[:2] == (0, "full.ckpt is whole: 1 file checked\n")
    assert command("convert", "full.ckpt", "back.ckpt")[0] == 0
    assert_equal(tensors_of(Path("back.ckpt")), tensors_of(trained))
    assert command("convert", "full.ckpt", "weights.ckpt", "--weights_only", "true")[0] == 0
    assert not [key for key in read_manifest("weights.ckpt").tensors if key.startswith("optimizer.")]
    assert (
        command("export", "full.ckpt", "out", "--dtype", "bf16", "--module", "body", "--max_shard_size", "1KB")[0] == 0
    )
    assert {t.dtype for t in read_safetensors(Path("out")).values()} == {torch.bfloat16}

    for arguments, said in {
        ("inspect", "nothing"): "there is no checkpoint at nothing",
        ("verify", "nothing"): "there is no checkpoint at nothing",
        ("convert", "trained.ckpt", "full.ckpt"): "full.ckpt exists",
        ("export", "trained.ckpt", "new", "--max_shard_size", "big"): "max_shard_size is 'big'",
        ("export", "trained.ckpt", "new", "--module", "tail"): "there is no tensor of 'tail'",
        ("export", "trained.ckpt", "new", "--dtype", "fp8"): "dtype: got fp8",
    }.items():
        code, output, error = command(*arguments)
        assert (code, output) == (2, "")
        assert error.count("error: ") == 1
        assert said in error
    (trained / "trainer.pt").write_bytes(b"")
    code, _, error = command("verify", "trained.ckpt")
    assert code == 2
    assert "trained.ckpt is damaged: trainer.pt" in error


def test_a_portable_checkpoint_of_a_converted_file_loads(tmp_path: Path, trained: Path) -> None:
    write_full(tmp_path / "full.ckpt", open_any(trained))
    write_portable(tmp_path / "back.ckpt", open_any(tmp_path / "full.ckpt"))
    tensors = {"model.embed.weight": torch.zeros(7, 5)}
    load_tensors(tmp_path / "back.ckpt", tensors, prefixes=())
    assert torch.equal(tensors["model.embed.weight"], tensors_of(trained)["model.embed.weight"])
