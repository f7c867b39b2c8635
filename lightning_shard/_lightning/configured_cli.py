"""LightningCLI that takes no configuration from checkpoints."""

from lightning.pytorch.cli import LightningCLI

from lightning_shard.private_names import require

require(LightningCLI, "_parse_ckpt_path")


class ConfiguredCLI(LightningCLI):
    """LightningCLI that does not open ``ckpt_path``. Lightning's own merges that file's hyperparameters, with a class
    name, into the configuration, so that the file's author would decide which code is run.
    """

    def _parse_ckpt_path(self) -> None:
        pass
