"""Load pretrained weights into a module from YAML, without code in the module."""

from weakref import WeakSet

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard.arguments import checked
from lightning_shard.checkpoint.foreign.pretrained_weights import load_pretrained
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.names import class_name


class PretrainedWeights(Callback):
    """Fills a module or a submodule from safetensors files, after it is sharded and before the first step."""

    @checked("PretrainedWeights")
    def __init__(
        self, path: str, module: str = "", rename: dict[str, str | None] | None = None, strict: bool = True
    ) -> None:
        """Choose files and module as for `lightning_shard.load_pretrained`.

        Args:
            path: a safetensors file, an index of several files, or a directory with either.
            module: name of the submodule to fill, such as ``encoder``. Default: the LightningModule itself.
            rename: prefixes of the files' names, mapped to prefixes of the module's names. null leaves tensors out.
            strict: refuse tensors of the module that the files lack and tensors of the files that the module lacks.
        """
        self.path, self.module, self.rename, self.strict = path, module, rename, strict
        self._filled: WeakSet[LightningModule] = WeakSet()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load once for each module, so that a second fit continues the first. A checkpoint to resume loads later."""
        self._load(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load for an evaluation outside of a fit, unless it has a checkpoint."""
        if trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path is None:
            self._load(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def _load(self, pl_module: LightningModule) -> None:
        if pl_module in self._filled:
            return
        try:
            module = pl_module.get_submodule(self.module)
        except AttributeError:
            children = ", ".join(name for name, _ in pl_module.named_children())
            raise ConfigurationError(
                f"PretrainedWeights: module is {self.module!r}, which {class_name(pl_module)} does not have. Its "
                f"submodules are {children}."
            ) from None
        load_pretrained(module, self.path, rename=self.rename, strict=self.strict)
        self._filled.add(pl_module)
