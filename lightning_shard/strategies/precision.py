"""Lightning's precision plugin: loss scaling, loss weights, clipping, and the order of an optimizer step."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._lightning import loops
from lightning_shard.arguments import Given, checked
from lightning_shard.engines.engine import Engine, Run
from lightning_shard.engines.module_checks import refuse_second_pass
from lightning_shard.errors import ConfigurationError, PrecisionError
from lightning_shard.precision.float8 import Float8
from lightning_shard.precision.loss_scale import LossScaler, LossScaling, state_from_dict
from lightning_shard.precision.loss_weight import LossWeights
from lightning_shard.precision.policy import DTYPES, PrecisionPolicy, autocasting, policy_from
from lightning_shard.precision.words import DType
from lightning_shard.precision.words import Precision as PrecisionWord
from lightning_shard.ranks import Ranks, reachable
from lightning_shard.run.nonfinite import NonFinite, NonFiniteWatch
from lightning_shard.strategies.refusals import refuse_loss, refuse_plugin
from lightning_shard.strategies.settings import CommonSettings
from lightning_shard.tensors.clipping import clip_by_norm, clip_by_value, gradient_norm
from lightning_shard.tensors.flat import FlatTensor, local


class ShardPrecision(Precision):
    """Names the precision of a strategy of this package, and scales the loss in fp16. The engines cast.

    Parameters and floating module inputs are cast as a whole, the same on every engine, unless ``autocast`` is set.
    ``Trainer(precision=...)`` makes one if none is given. In YAML::

        trainer:
          plugins:
            class_path: lightning_shard.ShardPrecision
            init_args: {precision: 16-mixed, loss_scale: {initial: 1024.0}}
    """

    @checked("ShardPrecision", error=PrecisionError)
    def __init__(
        self,
        precision: Literal[PrecisionWord, "fp8-mixed"] = "32-true",
        *,
        reduce: DType | None = None,
        output: DType | None = None,
        autocast: bool = False,
        loss_scale: Given[LossScaling] | None = None,
        float8: Given[Float8] | None = None,
    ) -> None:
        """Store the precision.

        Args:
            precision: as in ``Trainer(precision=...)``. `policy_from` has the dtypes of each word. ``16-mixed``
                is fp16 on CPU too, while the Trainer's flag becomes ``bf16-mixed``. ``fp8-mixed`` is
                ``bf16-mixed`` with linear layers that multiply in float8 by torchao.
            reduce: dtype in which gradients cross the network: "fp32" or the compute dtype, and "fp32" under
                ``aligned``. Default: "fp32", and under a plain ``-true`` precision the parameters' own.
            output: dtype of modules' outputs to the LightningModule's own code, "fp32" or the compute dtype.
                Default: "fp32", for a loss in fp32, and under a plain ``-true`` precision the compute dtype.
            autocast: run steps under ``torch.autocast`` on fp32 parameters, as stock Lightning does, instead of casting
                at modules. "bf16-mixed" and "16-mixed" only. Parameters are gathered and reduced in fp32 then.
            loss_scale: how the loss is scaled in fp16. Default: as in torch, from 2**16. Plain ``16-true`` has none.
            float8: layers that ``fp8-mixed`` converts, and the scaling. Default: all that float8 kernels can run.

        Raises:
            PrecisionError: an unknown word or dtype. The Trainer's constructor refuses contradictions, because only
                there it is known whether the strategy is aligned.
        """
        super().__init__()
        self.precision = precision  # type: ignore[assignment] # Lightning does not know fp8-mixed
        self._overrides: dict[str, Any] = {
            "reduce": DTYPES[reduce] if reduce is not None else None,
            "output": DTYPES[output] if output is not None else None,
            "autocast": autocast,
            "loss_scale": loss_scale,
            "float8": float8,
        }
        self.nonfinite: NonFiniteWatch | None = None  # of this fit
        self._scale: LossScaler | None = None
        self._optimizers: list[Optimizer] = []
        self._backward_ran = False  # In this fit.
        self.backward_pending = False  # A backward pass ran since the last optimizer step.
        self.step_skipped = False
        """Whether the last optimizer step was skipped. It is the same on every rank."""

    @property
    def sets_loss_scale(self) -> bool:
        return self._overrides["loss_scale"] is not None

    def policy(self, *, aligned: bool, at_boundary: bool = False) -> PrecisionPolicy:
        """Dtypes of this precision."""
        return policy_from(self.precision, aligned=aligned, at_boundary=at_boundary, **self._overrides)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Refuse other strategies, which call this method (ConfigurationError)."""
        raise ConfigurationError(
            "ShardPrecision steps the engine of this package's strategies, but the Trainer has another strategy. Use "
            "strategy='shard_ddp' or another name of `lightning-shard strategies`, or the Trainer's own precision."
        )

    def begin_loss_scale(self, policy: PrecisionPolicy) -> None:
        """Begin with the loss scale of ``policy``, in a new Trainer."""
        self._scale = None if policy.loss_scale is None else LossScaler(policy.loss_scale)

    def connect_engine(self, engine: Engine, run: Run, module: LightningModule, settings: CommonSettings) -> None:
        """Attach the engine of a run. ConfigurationError: weights of losses with manual optimization."""
        key, ranks = settings.loss_weight_key, run.mesh.size()
        if key is not None and not run.automatic:
            raise ConfigurationError(
                f"loss_weight_key is {key!r}, but {type(module).__name__} runs backward and steps itself "
                "(automatic_optimization is False), so that there is no end of a step to divide by the weights at. "
                "Multiply the losses by their weights in training_step, or use automatic optimization."
            )
        self._engine, self._run, self._module, self._settings = engine, run, module, settings
        self._weights = LossWeights(key, ranks=ranks, device=run.device, scaled=self._scale is not None)
        self.nonfinite, self._backward_ran = None, False
        if run.fitting and isinstance(settings.nonfinite, NonFinite):
            self.nonfinite = NonFiniteWatch(settings.nonfinite, module, engine, device=run.device)

    def in_autocast(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` with the policy's autocast, inside of an engine's forward: DeepSpeed turns off one around it."""
        context = autocasting(self._run.policy, self._run.device.type, cache=self._engine.replicates)
        return context(step) if isinstance(context, torch.autocast) else step

    def take_weight(self, output: Any, arguments: Sequence[Any]) -> Any:
        """Take the weight from a training step's output for ``arguments``, and return the output. All ranks call it."""
        if self._run.automatic:
            refuse_loss(output, self._module)
            self._weights.take_weight(output, arguments[0] if arguments else None)
        return output

    # Loss scale

    @property
    def loss_scale(self) -> float | None:
        """Factor of the next loss. None: no scaling."""
        return None if self._scale is None else self._scale.state.scale

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Attach a fit's optimizers. ConfigurationError: one computes the loss again, but steps may be skipped."""
        self._optimizers = optimizers
        again = [type(o).__name__ for o in optimizers if self._engine.needs(o).again]
        skips = "nonfinite is set, which" if self.nonfinite is not None else ""
        if self._scale is not None:
            skips = f"precision is {self.precision!r}, whose loss scale"
        if again and skips:
            raise (PrecisionError if self._scale is not None else ConfigurationError)(
                f"{skips} may skip steps, but {again[0]} computes the loss again in a step. Remove nonfinite, use "
                "'bf16-mixed' or '32-true', or another optimizer."
            )
        return super().connect(model, optimizers, lr_schedulers)

    @contextmanager
    @override
    def train_step_context(self) -> Generator[None, None, None]:
        self.step_skipped = False
        if self._scale is not None:
            self._scale.begin_batch()
        with super().train_step_context():
            yield

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss, then run Lightning's hooks, which see it scaled as under Lightning's own AMP."""
        self._backward_ran = self.backward_pending = True
        if self._weights.given:
            ends = not loops.should_accumulate(module.trainer)
            tensor = self._weights.scale_loss(tensor, ends=ends, waiting=self._accumulated_parts)
        if self.nonfinite is not None:
            self.nonfinite.check_loss(tensor)
        if self._scale is not None:
            tensor = self._scale.scale_loss(tensor)
        return super().pre_backward(tensor, module)

    def _accumulated_parts(self) -> list[Tensor]:
        waiting = self._engine.accumulated().values()
        return [part for t in waiting for part in (t.views if isinstance(t, FlatTensor) else [local(t)])]

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, clip, and step. The step is skipped on every rank after an overflow, with weights
        of 0, or as ``nonfinite`` says. Hooks run and ``global_step`` counts as under Lightning's AMP. All ranks call
        it.
        """
        engine, weights = self._engine, self._weights
        needs = engine.needs(optimizer)
        _refuse_differing_arguments(kwargs, optimizer)

        def closure_with_reduction() -> Any:
            result = closure()
            needed = engine.steps_itself or self._scale is not None
            if needed and not self._backward_ran and not self._run.automatic:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} is to step, but {type(model).__name__} has run no manual_backward, "
                    "which scales and reduces gradients. Call self.manual_backward(loss), not loss.backward()."
                )
            engine.finish_gradients()
            self.backward_pending = False
            return _mean_over_ranks(result) if needs.loss else result

        plain = self._scale is None and not engine.steps_itself and self.nonfinite is None
        if plain and (weights.given is False or (needs.again and weights.given is None)):
            return super().optimizer_step(optimizer, model=model, closure=closure_with_reduction, **kwargs)
        result = closure_with_reduction()
        if needs.again:
            raise ConfigurationError(
                f"{type(optimizer).__name__} computes the loss again in its step, but steps are taken after backward, "
                "because losses have weights or another optimizer needs full parameters. Use another optimizer."
            )
        if needs.loss:
            kwargs["closure"] = lambda: result
        counts = not weights.given or self._divide_by_weights(optimizer, model)
        overflow = self._unscale(optimizer)
        counts = not self._refuses_nonfinite(optimizer, model) and counts
        self.step_skipped = overflow or not counts
        if self._scale is not None:
            _log_number(model, "loss_scale", self._scale.state.scale)
        self._after_closure(model, optimizer)
        engine.step_optimizer(optimizer, skip=self.step_skipped, **kwargs)
        if self._scale is not None:
            self._scale.update_scale(optimizer, self._optimizers, self._gradients, counts=counts)
        return result

    def _refuses_nonfinite(self, optimizer: Optimizer, module: LightningModule) -> bool:
        """Whether to skip the step for a loss or gradient of inf or NaN."""
        if self.nonfinite is None:
            return False
        gradients = [] if self._scale is not None else self._gradients(optimizer)
        refused = self.nonfinite.check_step(gradients, step=module.trainer.global_step + 1)
        _log_number(module, "nonfinite_steps", self.nonfinite.steps)
        return refused

    @override
    def teardown(self) -> None:
        if self.nonfinite is not None:
            self.nonfinite.remove_hooks()
        super().teardown()

    def _divide_by_weights(self, optimizer: Optimizer, module: LightningModule) -> bool:
        """Divide the gradients by the weights of the step's losses. False: there are no weights."""
        loss = self._weights.average_gradients(
            self._gradients(optimizer), micro_batches=module.trainer.accumulate_grad_batches
        )
        if loss is not None:
            module.log("weighted_loss", loss)
        return loss is not None

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:

        def call(loss: Tensor) -> None:
            super(ShardPrecision, self).backward(loss, model, optimizer, *args, **kwargs)

        overridden = is_overridden("backward", model)
        allow = refuse_second_pass(tensor) if overridden and tensor.requires_grad else None
        self._engine.backward(tensor, call, overridden=overridden, **kwargs)
        if allow is not None and not self._run.automatic:
            allow()  # the next manual_backward may go through it

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return self._engine.gradients(optimizer)[0]

    def _unscale(self, optimizer: Optimizer) -> bool:
        """Unscale the gradients of ``optimizer``, unless a clip in this batch did. True: they overflowed."""
        scale = self._scale
        return scale is not None and scale.unscale_gradients(optimizer, self._gradients, device=self._run.device)

    @override
    def clip_gradients(
        self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip by one formula, after unscaling, and log ``grad_norm``, unless the step is skipped. All ranks."""
        if isinstance(optimizer, LightningOptimizer):  # from the user, in manual optimization
            optimizer = optimizer.optimizer
        if not self._run.automatic:
            self._engine.finish_gradients()  # the user clips before `optimizer_step`
        if self._unscale(optimizer):
            return
        gradients, mesh = self._engine.gradients(optimizer)
        by_norm = clip_val > 0 and str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "norm"
        if by_norm or self._settings.log_grad_norm:
            norm = gradient_norm(gradients, sharded_over=mesh)
            self._module.log("grad_norm", norm)
            if by_norm:
                clip_by_norm(gradients, clip_val, norm, error_if_nonfinite=self._settings.error_if_nonfinite)
        if clip_val > 0 and not by_norm:
            clip_by_value(gradients, float(clip_val))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Loss scale, for the checkpoint. Empty without one."""
        return {} if self._scale is None else asdict(self._scale.state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a checkpoint's loss scale if this run has one. CheckpointMismatchError: no such state."""
        if self._scale is not None:
            self._scale.state = state_from_dict(state_dict)


def raise_nonfinite(strategy: Any) -> None:
    """Check losses and gradients of the last step. All ranks call it. DataError on each: inf or NaN."""
    if (watch := strategy.precision_plugin.nonfinite) is not None:
        watch.answer_pending()


def _log_number(module: LightningModule, name: str, number: float) -> None:
    module.log(name, torch.tensor(float(number)))  # Lightning copies a plain number to the device and waits.


def _mean_over_ranks(loss: Any) -> Any:
    """Mean of a loss over all ranks, for an optimizer that steps by it. Other values stay. All ranks call it."""
    if not isinstance(loss, Tensor | float):
        return loss
    mean = reachable(torch.as_tensor(loss).detach().to(torch.float32, copy=True))
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return mean.to(loss.device) if isinstance(loss, Tensor) else float(mean)


def _refuse_differing_arguments(given: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Refuse arguments of an optimizer's step that differ between ranks. All ranks call it."""
    own = {name: float(value) for name, value in given.items() if isinstance(value, int | float | Tensor)}
    if own and any(each != own for each in Ranks.of().gather(own)):
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step is given other values on other ranks ({own} here), but ranks step the "
            "same parameters. Give it the same on all: self.all_gather(loss).mean()."
        )


def shard_precision_of(plugin: Precision | None) -> ShardPrecision | None:
    """Make a `ShardPrecision` of a stock plugin from the Trainer's flag. PrecisionError: it carries more."""
    if plugin is None or isinstance(plugin, ShardPrecision):
        return plugin
    refuse_plugin(plugin)
    return ShardPrecision(plugin.precision)  # type: ignore[arg-type]
