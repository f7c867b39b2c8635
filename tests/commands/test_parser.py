"""The parser of the command line between Lightning's calls and jsonargparse's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_shard import ShardCLI
from tests.commands.support import BASE, write_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*LeafSpec.*", "ignore::UserWarning")


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
