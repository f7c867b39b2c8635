"""LightningCLI without what it takes from checkpoints. Tested with Lightning 2.6.4 to 2.6.6."""

from lightning.pytorch.cli import LightningCLI

from lightning_shard.private_names import require

require(LightningCLI, "_parse_ckpt_path", tested="lightning 2.6")


class ConfiguredCLI(LightningCLI):
    """LightningCLI that leaves ``ckpt_path`` closed. Lightning's own merges that file's hyperparameters, with the name
    of a class to make, into the configuration: whoever wrote the file would decide which code is run.
    """

    def _parse_ckpt_path(self) -> None:
        pass
