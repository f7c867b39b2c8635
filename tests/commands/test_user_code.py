"""Mistakes in the user's own code: their place, the rule, and one traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from lightning_shard import ShardCLI
from tests.commands.support import write_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*LeafSpec.*", "ignore::UserWarning")


USER_CODE = """
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch.utils.data import DataLoader

class Bug(BoringModel):
    def training_step(self, batch, batch_idx):
        raise ValueError("a bug")

class Interrupted(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)

class Refuses(BoringModel):
    def __init__(self, width: int = 3):
        super().__init__()
        raise ValueError(f"width is {width}, but must be even")

class Returns(BoringModel):
    def __init__(self, what: str):
        super().__init__()
        self.what = what

    def training_step(self, batch, batch_idx):
        output = self.layer(batch)
        return {
            "float": 3.5, "vector": output.sum(0), "detached": output.sum().detach(),
            "key": {"los": output.sum()},
        }[self.what]

    def configure_optimizers(self):
        if self.what == "empty":
            return torch.optim.SGD([], lr=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1)

class NoBatch(BoringDataModule):
    def train_dataloader(self):
        return DataLoader(self.random_train, batch_size=0)
"""


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (["--model", "usercode.Bug"], ValueError, "a bug"),
    ],
)
def test_a_bug_keeps_its_traceback(
    arguments: list[str],
    kind: type[Exception],
    text: str,
    command: Callable[..., ShardCLI],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_config("usercode.py", USER_CODE)
    with pytest.raises(kind, match=text) as raised:
        command("fit", "--config", "base.yaml", *arguments)
    assert any(frame.path.name == "usercode.py" for frame in raised.traceback)
    assert "error: " not in capsys.readouterr().err
    sys.modules.pop("usercode")


RETURNS = ["--trainer.strategy", "shard_fsdp", "--model", "usercode.Returns", "--model.what"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "usercode.Refuses"], ["width is 3, but must be even", "in __init__"]),
        (["--data", "usercode.NoBatch"], ["batch_size=0", "in train_dataloader"]),
        (["--model", "broken.Model"], ["No module named 'nothing_at_all'", "broken.py:1"]),
        ([*RETURNS, "empty"], ["optimizer got an empty parameter list", "in configure_optimizers"]),
        ([*RETURNS, "float"], ["training_step returned 3.5, a float", "Return the loss tensor itself"]),
        ([*RETURNS, "vector"], ["a torch.float32 tensor of shape (2,) with a gradient", "its .mean() or .sum()"]),
        ([*RETURNS, "detached"], ["tensor of shape () without a gradient"]),
        ([*RETURNS, "key"], ["a dict", 'as the entry "loss"']),
    ],
)
def test_a_mistake_in_user_code_says_where(
    arguments: list[str], expected: list[str], command: Callable[..., ShardCLI], capsys: pytest.CaptureFixture[str]
) -> None:
    write_config("usercode.py", USER_CODE)
    write_config("broken.py", "import nothing_at_all")
    with pytest.raises(SystemExit):
        command("fit", "--config", "base.yaml", *arguments)
    error = capsys.readouterr().err
    assert all(part in error for part in expected), error
    assert error.count("usercode.py:") + error.count("broken.py:") == 1
    sys.modules.pop("usercode", None)
