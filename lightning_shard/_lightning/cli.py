"""LightningCLI without what it takes from checkpoints. Tested with Lightning 2.6.4 to 2.6.6."""

from lightning.pytorch.cli import LightningCLI

from lightning_shard.private_names import require

require(LightningCLI, "_parse_ckpt_path", tested="lightning 2.6")


class ConfiguredCLI(LightningCLI):
    """LightningCLI whose configuration comes from the user alone.

    Lightning loads the file ``ckpt_path`` on every rank and merges its hyperparameters into the configuration, with the
    name of a class to make. Whoever wrote the file would decide which code is run.
    """

    def _parse_ckpt_path(self) -> None:
        pass
