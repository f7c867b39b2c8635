"""The command line in this process: what it parses, prints and refuses."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard import ShardCLI, ShardDDPStrategy, ShardFSDPStrategy, ShardPrecision
from lightning_shard.precision.policy import policy_from
from tests.commands.support import DEMO, write_config
from tests.commands.test_user_code import USER_CODE

FSDP = {"class_path": "lightning_shard.ShardFSDPStrategy"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*LeafSpec.*", "ignore::UserWarning")


def _strategy(**init_args: object) -> dict[str, object]:
    return {"trainer": {"strategy": {**FSDP, "init_args": init_args}}}


STOPPING = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "x", "mode": "up"}}
MISTAKES = {
    "wrong key": ({"trainer": {"max_epohs": 3}}, [], ["trainer.max_epohs", "Did you mean trainer.max_epochs"]),
    "wrong type": ({"trainer": {"max_epochs": "three"}}, [], ["trainer.max_epochs", "Given value: three"]),
    "wrong choice": ({"trainer": {"precision": "bf17"}}, [], ["trainer.precision", "bf17", "bf16-mixed"]),
    "wrong name": ({"trainer": {"strategy": "shard_fdsp"}}, [], ["'shard_fdsp'", "mean shard_fsdp", "shard_ddp_al"]),
    "wrong argument": (_strategy(cpu_ofload=True), [], ["trainer.strategy", "cpu_ofload", "Did you mean cpu_offload"]),
    "refused by the constructor": (_strategy(timeout_seconds=-1), [], ["timeout_seconds is -1", "greater than 0"]),
    "refused by a callback": ({"trainer": {"callbacks": STOPPING}}, [], ["`mode` can be min, max, got up"]),
    "mesh does not divide": (_strategy(mesh={"replicate": 3}), [], ["mesh.replicate: 3", "1 process"]),
    "class not there": ({"model": {"class_path": f"{DEMO}.Boring"}}, [], ["model", f"'{DEMO}.Boring'", "no attribute"]),
    "no such file": ({}, ["--config", "nope.yaml"], ["config", "nope.yaml", "not exist"]),
    "broken file": ("a: [1\nb: 2", [], ["overlay.yaml", "line 2"]),
    "no mapping": ("- 1", [], ["overlay.yaml holds a list, but must hold a mapping"]),
    "no checkpoint": ({}, ["--ckpt_path", "nope.ckpt"], ["ckpt_path", "'nope.ckpt' does not exist"]),
    "not a checkpoint": ({}, ["--ckpt_path", "base.yaml"], ["ckpt_path", "'base.yaml' is not a checkpoint"]),
    "devices in words": ({}, ["--trainer.devices", "two"], ["devices: got two", "1 or more, indices, or auto"]),
    "no interval": ({"trainer": {"val_check_interval": 0}}, [], ["val_check_interval: got 0; allowed: a share"]),
    "folder not to be made": ({"trainer": {"default_root_dir": "base.yaml/runs"}}, [], ["base.yaml/runs"]),
    "no accumulation": ({"trainer": {"accumulate_grad_batches": 0}}, [], ["accumulate_grad_batches: got 0; allowed"]),
    "precision that is not run": (
        {"trainer": {"precision": "64-true", "strategy": "shard_fsdp"}},
        [],
        ["64-true", "bf16-mixed"],
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake(case: str, command: Callable[..., ShardCLI], capsys: pytest.CaptureFixture[str]) -> None:
    overlay, arguments, expected = MISTAKES[case]
    with pytest.raises(SystemExit) as ended:
        command("fit", "--config", "base.yaml", "--config", write_config("overlay.yaml", overlay), *arguments)
    assert ended.value.code == 2
    assert ended.value.__cause__ is not None
    output, error = capsys.readouterr()
    assert output == ""
    assert error.count("error: ") == 1
    message = error.partition("error: ")[2]
    assert all(part in message for part in expected), message
    for noise in ("Traceback", "usage:"):
        assert noise not in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ['expected "subcommand" to be one of', "fit,validate,test,predict,init"]),
        (["fot"], ["'fot'", "'fit'"]),
        (["fit"], ["arguments are required: fit.model"]),
    ],
)
def test_mistake_in_the_command(
    arguments: list[str], expected: list[str], command: Callable[..., ShardCLI], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(*arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(part in error for part in expected), error


def test_traceback_on_demand(command: Callable[..., ShardCLI], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command("fit", "--config", "base.yaml", "--trainer.max_epochs", "three", "--traceback")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert 'error: Parser key "trainer.max_epochs"' in error
    assert "Traceback (most recent call last)" in error


def test_yaml_of_a_strategy_is_an_overlay(command: Callable[..., ShardCLI], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command("strategies", "shard_fsdp_grad_op_aligned")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "#      async_save: false" in text
    assert "#      aligned" not in text, "it is among those of the name"
    write_config("strategy.yaml", text)
    cli = command("--config", "base.yaml", "--config", "strategy.yaml", run=False)
    assert type(cli.trainer.strategy) is ShardFSDPStrategy
    assert cli.trainer.strategy.aligned


def test_later_configurations_win(command: Callable[..., ShardCLI]) -> None:
    first = write_config("1.yaml", _strategy(log_grad_norm=True, timeout_seconds=5))
    second = write_config("2.yaml", _strategy(timeout_seconds=7))
    cli = command("--config", "base.yaml", "--config", first, "--config", second, "--trainer.max_steps=3", run=False)
    assert cli.trainer.strategy.log_grad_norm
    assert cli.trainer.strategy.timeout.total_seconds() == 7
    assert cli.trainer.max_steps == 3

    name = write_config("4.yaml", {"trainer": {"strategy": "shard_ddp"}})
    cli = command("--config", "base.yaml", "--config", first, "--config", name, run=False)
    assert type(cli.trainer.strategy) is ShardDDPStrategy
    assert cli.trainer.strategy.timeout.total_seconds() == 1800


def test_plain_lightning_cli_takes_the_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Callable[..., ShardCLI]
) -> None:
    for name, strategy in (("a.yaml", "shard_ddp_aligned"), ("b.yaml", {**FSDP, "init_args": {"aligned": True}})):
        overlay = write_config(name, {"trainer": {"strategy": strategy}})
        monkeypatch.setattr(sys, "argv", ["script", "--config", "base.yaml", "--config", overlay])
        assert LightningCLI(run=False).trainer.strategy.aligned


def test_after_fit_says_where_the_checkpoint_is(
    command: Callable[..., ShardCLI], capsys: pytest.CaptureFixture[str]
) -> None:
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "saved"}}
    overlay = write_config("save.yaml", {"trainer": {"callbacks": [callback]}})
    command("fit", "--config", "base.yaml", "--config", overlay, "--trainer.callbacks.save_last", "true")
    output = capsys.readouterr().out
    best = re.search(r"^checkpoint: (saved/.*)$", output, re.MULTILINE)
    last = re.search(r"^last checkpoint: (saved/last.ckpt)$", output, re.MULTILINE)
    assert Path(best[1]).exists()
    assert Path(last[1]).exists()
    printed = re.search(r"^validate it with: lightning-shard (.*)$", output, re.MULTILINE)[1]
    expected = "validate --config base.yaml --config save.yaml --trainer.callbacks.save_last true --ckpt_path "
    assert printed == expected + best[1]
    resumed = re.search(r"^resume with: lightning-shard (.*)$", output, re.MULTILINE)[1]
    assert resumed == expected.replace("validate", "fit", 1) + last[1]


def test_what_a_fit_did_not_do_is_said(command: Callable[..., ShardCLI], capsys: pytest.CaptureFixture[str]) -> None:
    command("fit", "--config", "base.yaml", "--trainer.limit_train_batches", "0")
    output = capsys.readouterr().out
    assert "nothing was trained: the training dataloader has no batches\nno checkpoint was saved\n" in output


def test_ctrl_c_says_what_is_saved(command: Callable[..., ShardCLI], capsys: pytest.CaptureFixture[str]) -> None:
    write_config("usercode.py", USER_CODE)
    every = {"dirpath": "saved", "every_n_train_steps": 1, "filename": "{step}"}
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": every}
    write_config("save.yaml", {"trainer": {"max_steps": 5, "callbacks": [callback]}})
    pressed = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            command("fit", "--config", "base.yaml", "--config", "save.yaml", "--model", "usercode.Interrupted")
    finally:
        signal.signal(signal.SIGINT, pressed)  # Lightning ignores it from then on
        sys.modules.pop("usercode", None)
    assert ended.value.code == 1
    output = capsys.readouterr().out
    assert "interrupted at step 2\n" in output
    assert "\ncheckpoint: saved/step=2.ckpt" in output
    assert "\nresume with: lightning-shard fit --config base.yaml --config save.yaml --model usercode.I" in output


def test_a_second_run_in_the_same_folder(command: Callable[..., ShardCLI]) -> None:
    command("fit", "--config", "base.yaml")
    fitted = Path("config.yaml").read_text()
    command("validate", "--config", "base.yaml", "--seed_everything", "2")
    assert Path("config.yaml").read_text() == fitted
    assert "seed_everything: 2" in Path("config_validate.yaml").read_text()


FP16_CASES = {
    "a class": ({"strategy": {**FSDP, "init_args": {"aligned": True}}}, True),
}


@pytest.mark.parametrize("case", FP16_CASES)
def test_fp16_on_cpu(case: str, command: Callable[..., ShardCLI]) -> None:
    settings, aligned = FP16_CASES[case]
    overlay = write_config("fp16.yaml", {"trainer": {"precision": "16-mixed", **settings}})
    trainer = command("fit", "--config", "base.yaml", "--config", overlay).trainer
    assert trainer.precision == "16-mixed"
    assert trainer.strategy.policy == policy_from("16-mixed", aligned=aligned)
    # Its loss is in fp16, in which 2**16 is inf: the one step was skipped.
    assert trainer.precision_plugin.loss_scale == 2.0**15
    assert trainer.global_step == 1
    # What was saved runs again, and is what ran.
    again = command("fit", "--config", "config.yaml").trainer
    assert (again.precision, again.strategy.policy) == ("16-mixed", trainer.strategy.policy)


def test_fp16_of_another_strategy_is_left_to_lightning(command: Callable[..., ShardCLI]) -> None:
    overlay = write_config("fp16.yaml", {"trainer": {"precision": "16-mixed"}})
    trainer = command("fit", "--config", "base.yaml", "--config", overlay).trainer
    assert trainer.precision == "bf16-mixed"
    assert not isinstance(trainer.precision_plugin, ShardPrecision)


class Named(BoringModel):
    """The class that a checkpoint names."""

    made = 0

    def __init__(self, **_: object) -> None:
        super().__init__()
        Named.made += 1


def test_a_checkpoint_names_no_class_to_make(command: Callable[..., ShardCLI]) -> None:
    hyper_parameters = {"_class_path": f"{__name__}.Named", "any": 1}
    command("fit", "--config", "base.yaml").trainer.save_checkpoint("a.ckpt")
    torch.save({**torch.load("a.ckpt"), "hyper_parameters": hyper_parameters}, "hostile.ckpt")
    cli = command("validate", "--config", "base.yaml", "--ckpt_path", "hostile.ckpt")
    assert (type(cli.model), Named.made) == (BoringModel, 0)
