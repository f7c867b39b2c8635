"""Fits on several processes that save into an S3 server and go on from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard import PreemptionConfig
from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files import commit, tensor_files
from lightning_shard.checkpoint.files.location import location
from lightning_shard.checkpoint.files.manifest import Contents
from lightning_shard.checkpoint.inspect import verify
from lightning_shard.checkpoint.load import open_checkpoint
from lightning_shard.errors import CheckpointCorruptError, CheckpointUnreachableError
from lightning_shard.registry import build
from tests.checkpoint.calls import FACTS
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.resume.test_resume import _assert_continues, _fit

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
PART_BYTES = 5 << 20  # the least that S3 takes of an upload in parts


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server in this process."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install s3fs 'moto[s3]' flask flask-cors")
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str) -> str:
    """The address, with an empty bucket ``run``."""
    urlopen(Request(f"{server}/moto-api/reset", method="POST")).read()
    use(server).mkdir("run")
    return server


def use(server: str) -> Any:
    """Have this process find the server as a user's process does; each test's environment is put back."""
    os.environ.update({**KEYS, "AWS_ENDPOINT_URL": server})
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    return fs


def names(fs: Any, folder: str) -> list[str]:
    fs.invalidate_cache()
    return sorted(name.rpartition("/")[2] for name in fs.ls(folder, detail=False))


def strategy(name: str, async_save: bool) -> Any:
    built = build(name, preemption=PreemptionConfig(run="mine"))
    built.async_save = async_save
    return built


def fit_and_go_on(server: str, name: str, async_save: bool) -> list[Any]:
    """A fit that never stopped, and the second half of one that went on by ``auto`` from the store."""
    use(server)

    def fit(steps: int, resume: str | None = None) -> dict[str, Any]:
        top = {"every_n_train_steps": 2, "save_top_k": 2, "monitor": "step", "mode": "max", "save_last": True}
        saves: list[pl.Callback] = [ModelCheckpoint("s3://run/top", "{step}", **top)]
        options = {"folder": "s3://run/all", "every": 2, "callbacks": saves}
        return _fit(strategy(name, async_save), steps=steps, resume=resume, **options)

    straight = _fit(strategy(name, False), steps=9)
    fit(5)
    return [straight, fit(9, resume="auto")]


@pytest.mark.parametrize(
    ("name", "async_save"),
    [("shard_fsdp", True), pytest.param("shard_deepspeed_stage_2", False, marks=pytest.mark.matrix)],
)
def test_a_fit_goes_on_from_a_bucket(bucket: str, name: str, async_save: bool) -> None:
    runs = run_distributed(fit_and_go_on, 2, bucket, name, async_save, timeout=300)
    _assert_continues([straight for straight, _ in runs], [resumed for _, resumed in runs], 4)
    fs = use(bucket)
    assert names(fs, "run/top") == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert names(fs, "run/all") == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
    folders = [names(fs, f"run/top/{name}") for name in names(fs, "run/top")]
    assert [len(found) for found in folders] == [2, 1, 1]  # the checkpoint and what it replaced
    for name in names(fs, "run/top"):
        assert "__1_0.distcp" in verify(f"s3://run/top/{name}")  # each rank wrote
    data = next(key for key in fs.find("run/top/step=8.ckpt") if key.endswith("__1_0.distcp"))
    whole = fs.cat(data)
    fs.pipe(data, whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(CheckpointCorruptError, match="does not match its checksum"):
        open_checkpoint("s3://run/top/step=8.ckpt")


def test_options_reach_the_store_and_parts_are_whole(bucket: str) -> None:
    address = os.environ.pop("AWS_ENDPOINT_URL")
    client = {"client_kwargs": {"endpoint_url": address}, "default_block_size": PART_BYTES}
    contents = Contents(tensors={"model.w": torch.arange(3e6)}, trainer_state={}, facts=FACTS)
    Saver().save(location("s3://run/parts.ckpt", client), lambda: contents, background=False)
    use(bucket)
    assert len(verify("s3://run/parts.ckpt")) == 5
    opened = open_checkpoint("s3://run/parts.ckpt")
    assert torch.equal(tensor_files.read_full(opened.directory, opened.metadata, "model.w"), torch.arange(3e6))


def test_a_missing_bucket_is_not_an_empty_folder(bucket: str) -> None:
    missing = "s3://missing-bucket/x"
    for read in (lambda: commit.clean_folder(missing, remove=False), lambda: open_checkpoint(missing)):
        with pytest.raises(CheckpointUnreachableError, match=r"missing-bucket/x.* can't be reached: .*bucket does not"):
            read()
    assert not commit.clean_folder("s3://run/nothing", remove=False)


def refused_fit(server: str) -> tuple[str, int]:
    """Message of a fit without keys, and its steps until then."""
    fs = use(server)
    os.environ.update({"AWS_SHARED_CREDENTIALS_FILE": "none", "AWS_EC2_METADATA_DISABLED": "true"})
    del os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    type(fs).clear_instance_cache()
    module, saves = TinyLM(), [ModelCheckpoint("s3://run/x")]
    trainer = quiet_trainer(strategy=build("shard_ddp"), max_steps=2, enable_checkpointing=True, callbacks=saves)
    with pytest.raises(CheckpointUnreachableError) as refused:
        trainer.fit(module, loader())
    return str(refused.value), len(module.seen)


@pytest.mark.matrix
def test_a_fit_ends_at_once_where_its_store_cant_be_reached(bucket: str) -> None:
    for text, steps in run_distributed(refused_fit, 2, bucket):
        assert "Unable to locate cred" in text
        assert steps == 0
