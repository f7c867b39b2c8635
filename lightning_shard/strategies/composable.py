"""What the strategies on FSDP2's machinery share, whether it shards or replicates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard import _lightning
from lightning_shard.engines import forward, fsdp
from lightning_shard.engines.replicated import average_gradients
from lightning_shard.errors import ConfigurationError
from lightning_shard.strategies.base import ShardStrategy
from lightning_shard.strategies.cut_modules import refuse_cut_by_zero

FORWARD_METHODS = ("encode", "generate")
"""Methods that run a model without ``forward``, by the names that are common."""


_STATE = "_shard_state"
"""Where a module keeps its `ShardedModule`, so that another Trainer can go on with it."""


class ComposableStrategy(ShardStrategy):
    """Base of what runs on FSDP2's machinery, sharded or replicated."""

    _sharded: fsdp.ShardedModule | None = None
    _frees_gradients = False

    @abstractmethod
    def _sharding_options(self) -> fsdp.ShardingOptions:
        """What the user set about sharding."""

    @property
    def _forward_methods(self) -> tuple[str, ...]:
        return FORWARD_METHODS

    def _shard(self, module: LightningModule) -> None:
        options = self._sharding_options()
        earlier = _sharded_before(module)
        refuse_cut_by_zero(module, type(self).__name__)
        if earlier is not None:
            self._adopt(earlier, options)
            return
        self._sharded = fsdp.shard(
            module,
            mesh=self.device_mesh,
            device=self.root_device,
            policy=self.policy,
            options=options,
            seed=self._agreed_seed(),
            separate_children=not module.automatic_optimization,
        )
        module.__dict__[_STATE] = self._sharded
        self._sharded.undo.append(forward.install_runner(module))
        self._sharded.undo.append(forward.patch_methods(module, self._forward_methods))
        self._warn_upcast(self._sharded.upcast)

    def _adopt(self, earlier: fsdp.ShardedModule, options: fsdp.ShardingOptions) -> None:
        """Go on with a module that an earlier run sharded in the same way."""
        if (earlier.mesh, earlier.policy, earlier.options) != (self.device_mesh, self.policy, options):
            raise ConfigurationError(
                "The module was sharded by an earlier run of another strategy, precision or set of options, and its "
                "parameters can't be put together in place. Build a new module, and load the earlier one's checkpoint "
                "with ckpt_path."
            )
        self._sharded = earlier
        fsdp.reshard(earlier.root)

    def on_train_start(self) -> None:
        """See whether anyone wants the last step's gradients; see also the parent's."""
        super().on_train_start()
        assert self.lightning_module is not None
        self._frees_gradients = self.lightning_module.automatic_optimization and not _lightning.watches_zero_grad(
            self.lightning_module.trainer
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``training_step`` under the engine's hooks, without the last step's gradients in memory.

        Lightning drops them after the forward. By then they were there together with all of its activations, which is
        where the memory of many runs ends.
        """
        assert self.lightning_module is not None
        if self._frees_gradients and _lightning.begins_accumulation(self.lightning_module.trainer):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        return super().training_step(*args, **kwargs)

    def _gathers_in_forward(self) -> bool:
        return True

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        return forward.run(self.lightning_module, step, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """In manual optimization backward starts inside the step, before FSDP saw the step's output."""
        assert self.lightning_module is not None
        if self._sharded is not None and not self.lightning_module.automatic_optimization:
            forward.hook_loss(self.lightning_module, closure_loss)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure, reduce, clip and step, and let every forward from here on see the new values."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        # What a forward without a backward left gathered is old now.
        self._reshard()
        return result

    def _follow_freezing(self) -> None:
        """Nothing to do: FSDP reads `requires_grad` whenever it gathers."""

    def _set_gradient_sync(self, enabled: bool) -> None:
        assert self.lightning_module is not None
        fsdp.set_gradient_sync(self.lightning_module, enabled)

    def _finish_gradients(self) -> None:
        if self._sharded is not None:
            with self._watching_collectives():
                average_gradients(self._sharded.ignored, reduce_dtype=self.policy.reduce)

    def _held_gradients(self) -> list[tuple[str, Tensor]]:
        assert self.lightning_module is not None
        return [*super()._held_gradients(), *fsdp.unreduced_gradients(self.lightning_module)]

    def _before_reading_parameters(self) -> None:
        self._reshard()
        super()._before_reading_parameters()

    def _reshard(self) -> None:
        if self._sharded is not None:
            fsdp.reshard(self._sharded.root)

    def on_validation_end(self) -> None:
        """Free the parameters that the last evaluation forward left gathered."""
        self._reshard()

    on_test_end = on_predict_end = on_validation_end

    def teardown(self) -> None:
        """Let go of the run's resources; the module stays sharded, so that it can be evaluated or fitted again."""
        self._stop_ledger()
        self._reshard()
        self._release()


def _sharded_before(module: nn.Module) -> fsdp.ShardedModule | None:
    return module.__dict__.get(_STATE)
