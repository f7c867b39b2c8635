"""The parser of the command line between Lightning's calls and jsonargparse's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import cli as lightning_cli
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_shard import ShardCLI
from lightning_shard.commands import migrate
from lightning_shard.commands.plan_inputs import read_inputs
from tests.commands.support import BASE, write_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*LeafSpec.*", "ignore::UserWarning")


def test_only_lightning_uses_deprecated_names_of_jsonargparse(
    command: Callable[..., ShardCLI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "all")
    trainer = write_config("trainer.yaml", {"trainer": BASE["trainer"]})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        command("fit", "--config", trainer, model_class=BoringModel, datamodule_class=BoringDataModule)
        read_inputs(["--config", "base.yaml", "--trainer.strategy", "shard_ddp"], 0).config()
        migrate.check_result({"trainer": {"strategy": "shard_ddp"}})
    deprecated = [one for one in warned if one.category.__name__ == "JsonargparseDeprecationWarning"]
    assert {Path(one.filename) for one in deprecated} == {Path(lightning_cli.__file__)}, deprecated
    assert all("skip_none" in str(one.message) for one in deprecated)


def test_instantiators_of_a_subcommand_stand_first(command: Callable[..., ShardCLI]) -> None:
    made = []

    class CLI(ShardCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            def construct(class_type: type, *args: object, **kwargs: object) -> object:
                made.append(class_type)
                return class_type(*args, **kwargs)

            parser.add_instantiator(construct, BoringModel)

    trainer = write_config("trainer.yaml", {"trainer": BASE["trainer"]})
    CLI(BoringModel, BoringDataModule, args=["fit", "--config", trainer], environ={})
    assert made == [BoringModel]
