"""Pretrained weights for a module that knows nothing of them, from YAML."""

from weakref import WeakSet

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard.arguments import checked
from lightning_shard.checkpoint.foreign.pretrained_weights import load_pretrained
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.names import class_name


class PretrainedWeights(Callback):
    """Fills a module, or a submodule, from safetensors files once it was sharded, before the first step."""

    @checked("PretrainedWeights")
    def __init__(
        self, path: str, module: str = "", rename: dict[str, str | None] | None = None, strict: bool = True
    ) -> None:
        """Say what is loaded where; see `lightning_shard.load_pretrained`.

        Args:
            path: a safetensors file, an index of many, or a directory with one of them.
            module: name of the submodule that is filled, such as ``encoder``; default: the LightningModule itself.
            rename: beginnings of the files' names to what stands there in the module; null leaves tensors out.
            strict: refuse tensors of the module that the files lack and tensors of the files that the module lacks.
        """
        self.path, self.module, self.rename, self.strict = path, module, rename, strict
        self._filled: WeakSet[LightningModule] = WeakSet()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load, once for a module: a second fit goes on from what the first left. A resumed checkpoint comes later."""
        self._load(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load for an evaluation on its own, unless a checkpoint was loaded for it."""
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
