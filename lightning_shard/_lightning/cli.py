"""LightningCLI without what it takes from checkpoints."""

from lightning.pytorch.cli import LightningCLI

from lightning_shard.private_names import require

require(LightningCLI, "_parse_ckpt_path")


class ConfiguredCLI(LightningCLI):
    """LightningCLI that leaves ``ckpt_path`` closed. Lightning's own merges that file's hyperparameters, with the name
    of a class to make, into the configuration: whoever wrote the file would decide which code is run.
    """

    def _parse_ckpt_path(self) -> None:
        pass
