"""Inputs of ``lightning-shard plan``: the module with fake tensors, the first batch, the optimizer, the strategy."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_shard import registry
from lightning_shard._lightning import processes
from lightning_shard._lightning.loaders import batch_of
from lightning_shard.callbacks.ema import memory_of_averages
from lightning_shard.callbacks.throughput import without_side_effects
from lightning_shard.cluster.traces import user_frame
from lightning_shard.commands.cli import ShardCLI
from lightning_shard.commands.parser import ShardArgumentParser
from lightning_shard.engines.optimizer_probe import probe
from lightning_shard.errors import ConfigurationError
from lightning_shard.planning.model_facts import OptimizerFacts, trace_optimizer
from lightning_shard.planning.planner import Planner
from lightning_shard.planning.traffic import Nodes
from lightning_shard.precision.policy import SHORT_FORMS
from lightning_shard.strategies.precision import ShardPrecision
from lightning_shard.strategies.strategy import ShardStrategy
from lightning_shard.tensors import fake
from lightning_shard.tensors.names import replace_tensors
from lightning_shard.text import first_line, parse_count


class _StandIn(SimpleNamespace):
    """A Trainer with facts of the run, and None for its other attributes, such as the logger."""

    def __getattr__(self, name: str) -> None:
        if not hasattr(Trainer, name):
            raise AttributeError(f"{name!r} is not known before a run")


@dataclass(kw_only=True)
class Inputs(Planner):
    """A configured run that is not started, and the planner of its needs."""

    module: LightningModule  # With fake tensors.
    data: LightningDataModule | None
    strategy: ShardStrategy  # With its precision plugin.
    trainer: Mapping[str, Any]  # The Trainer's arguments.
    name: str  # The strategy's name, or its class's.
    config: Callable[[], dict[str, Any]]  # Returns the whole configuration of ``fit``, as in YAML.
    # In place of the Trainer. Kept here because modules refer to theirs weakly.
    standin: Any = field(default=None, repr=False)
    optimizer_type: Mapping[str, Any] | None = None  # ``type`` of the optimizer, once it is known.
    is_set_up: bool = False  # True once the hooks ``setup`` have run.

    @property
    def micro_batches(self) -> int:
        return int(self.trainer.get("accumulate_grad_batches") or 1)


def read_inputs(
    arguments: Sequence[str], memory: int, *, nodes: int | None = None, devices: int | None = None
) -> Inputs:
    """Read options of ``lightning-shard fit`` and build the module with fake tensors, or real ones if it reads values.

    ``memory``: bytes of a device. ``nodes`` and ``devices`` replace the configuration's numbers. UsageError, or a
    constructor's own error: a mistake in the configuration. ConfigurationError: a strategy of another package.
    """
    mode = fake.fake_mode()
    reader = _parse(arguments, mode)
    trainer = dict(reader.config_init["fit"]["trainer"])
    strategy, name = _strategy(trainer.get("strategy"))
    strategy.precision_plugin = _precision(trainer)
    inputs = Inputs(
        module=reader.model,
        data=reader.datamodule,
        strategy=strategy,
        trainer=trainer,
        # "auto" and -1 count as one.
        nodes=Nodes(
            nodes=nodes or parse_count(trainer.get("num_nodes")) or 1,
            devices=devices or parse_count(trainer.get("devices")) or 1,
        ),
        mode=mode,
        memory=memory,
        averages=memory_of_averages(trainer.get("callbacks")),
        # "auto" counts as GPUs.
        cpu=trainer.get("accelerator") == "cpu" or isinstance(trainer.get("accelerator"), CPUAccelerator),
        name=name,
        config=lambda: yaml.safe_load(reader.parser.dump(reader.config))["fit"],
    )
    inputs.standin = _stand_in(trainer, inputs.nodes, inputs.data)
    inputs.module.trainer = inputs.standin
    if inputs.data is not None:
        inputs.data.trainer = inputs.standin
    if is_overridden("setup", inputs.module, parent=LightningModule):
        _set_up(inputs)
    _without_data(inputs.module.configure_model, mode)
    if lazy := [name for name, parameter in inputs.module.named_parameters() if nn.parameter.is_lazy(parameter)]:
        raise ConfigurationError(
            f"{lazy[0]} has no size before a first forward, so that nothing can be planned: give the lazy module its "
            "sizes, or run a batch through it in __init__."
        )
    fake.make_fake(without_side_effects(inputs.module), mode)
    processes.set_device(inputs.module, torch.device("cpu"))  # the fake tensors' device
    return inputs


def _parse(arguments: Sequence[str], mode: Any) -> Any:
    class Parser(ShardArgumentParser):
        def wrap_instantiator(self, instantiator: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(instantiator)
            def without_data(class_type: Any, *args: Any, **kwargs: Any) -> Any:
                build = partial(instantiator, class_type, *args, **kwargs)
                is_module = isinstance(class_type, type) and issubclass(class_type, nn.Module)
                return _without_data(build, mode) if is_module else build()

            return super().wrap_instantiator(without_data)

    class Reader(ShardCLI):
        def instantiate_trainer(self, **kwargs: Any) -> Any:
            return SimpleNamespace(fit=lambda **_: None)

        def after_fit(self) -> None:
            """Print nothing, since nothing was trained."""

        def _report(self, error: Exception) -> None:
            """Leave errors to the caller."""

    with warnings.catch_warnings():
        # The program's own arguments may be there too.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        return Reader(args=["fit", *arguments], save_config_callback=None, parser_class=Parser)


def _without_data(build: Callable[[], Any], mode: Any) -> Any:
    """Call ``build`` on the meta device, if that fails with fake tensors, and at last with real ones."""
    for tensors in (torch.device("meta"), mode):
        try:
            with tensors:
                return build()
        except Exception:
            # It reads values or files.
            continue
    return build()


def _set_up(inputs: Inputs) -> None:
    """Run the hooks before ``configure_model``, in which a module may make layers with sizes of its data."""
    try:
        if inputs.data is None:
            inputs.module.prepare_data()
        else:
            inputs.data.prepare_data()
            inputs.data.setup("fit")
        _without_data(partial(inputs.module.setup, "fit"), inputs.mode)
        inputs.is_set_up = True
    except Exception as error:
        inputs.notes.append(f"the module's setup fails, so its layers are not counted: {first_line(error)}")


NEAREST = {"ddp": "shard_ddp", "fsdp": "shard_fsdp", "deepspeed": "shard_deepspeed_stage_2"}
"""Prefix of a stock strategy's name, to the name that is advised in its place."""


def _strategy(given: Any) -> tuple[ShardStrategy, str]:
    if isinstance(given, ShardStrategy):
        return given, type(given).__name__
    if isinstance(given, str) and given.lower() in registry.PRESETS:
        return registry.build(given.lower()), given.lower()
    fit = next((own for other, own in NEAREST.items() if str(given).startswith(other)), "shard_fsdp")
    raise ConfigurationError(
        f"trainer.strategy is {given!r}, whose memory is not known here. Plan with a strategy of lightning_shard: "
        f"--trainer.strategy {fit} (`lightning-shard strategies` lists them)."
    )


def _precision(trainer: Mapping[str, Any]) -> ShardPrecision:
    plugins, given = trainer.get("plugins") or [], str(trainer.get("precision") or "32-true")
    every = plugins if isinstance(plugins, list | tuple) else [plugins]
    own = next((plugin for plugin in every if isinstance(plugin, ShardPrecision)), None)
    return own or ShardPrecision(SHORT_FORMS.get(given, given))  # type: ignore[arg-type]


_BATCHES = 1000  # Assumed batches of an epoch and steps of a run without max_steps. No predicted byte depends on it.


def _stand_in(trainer: Mapping[str, Any], nodes: Nodes, data: LightningDataModule | None) -> Any:
    ranks, steps = nodes.ranks, trainer.get("max_steps") or -1

    def all_gather(tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0).repeat(ranks, *[1] * tensor.ndim)

    strategy = SimpleNamespace(all_gather=all_gather, world_size=ranks, global_rank=0, reduce=lambda t, *a, **k: t)
    facts: dict[str, Any] = {
        **dict.fromkeys(("global_rank", "local_rank", "node_rank", "global_step", "current_epoch"), 0),
        **dict.fromkeys(("is_global_zero", "training", "barebones", "is_last_batch"), True),
        **dict.fromkeys(("validating", "sanity_checking"), False),
        "gradient_clip_val": trainer.get("gradient_clip_val"),
        "accumulate_grad_batches": int(trainer.get("accumulate_grad_batches") or 1),
        "max_steps": steps,
        "max_epochs": trainer.get("max_epochs") or (-1 if steps > 0 else 1000),
        **dict.fromkeys(("estimated_stepping_batches", "num_training_batches"), steps if steps > 0 else _BATCHES),
        "datamodule": data,
        "loggers": [],
    }
    return _StandIn(**facts, strategy=strategy, world_size=ranks, num_nodes=nodes.nodes, num_devices=nodes.devices)


def first_batch(inputs: Inputs) -> Any:
    """Return the first batch of the training data, on the CPU, after the transfer hooks."""
    owner: Any = inputs.data if inputs.data is not None else inputs.module
    try:
        if not inputs.is_set_up:
            owner.prepare_data()
            owner.setup("fit")
        batch = batch_of(owner.train_dataloader())
        names = ("on_before_batch_transfer", "on_after_batch_transfer")
        hooks: Any = owner if any(is_overridden(name, owner) for name in names) else inputs.module
        batch = hooks.on_before_batch_transfer(batch, 0)
        return hooks.on_after_batch_transfer(batch, 0)
    except Exception as error:
        at = f" (at {place})" if (place := user_frame(error)) else ""
        raise ConfigurationError(
            f"the first batch of the training data can't be read: {type(error).__name__}: {error}{at}"
        ) from error


def loss_of(inputs: Inputs) -> Any:
    """Return ``(batch) -> loss`` of a module's training step, the sum of all losses in manual optimization."""
    module = inputs.module
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    for which, name in enumerate(("optimizers", "lr_schedulers")):
        module.__dict__[name] = partial(_idle_optimizers, inputs, which)

    def training_step(batch: Any) -> Any:
        return module.training_step(batch, 0) if takes_index else module.training_step(batch)

    return training_step if module.automatic_optimization else partial(_manual_step, inputs, training_step)


class _Idle:
    """An optimizer or a schedule whose ``step`` changes nothing."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def step(self, closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> Any:
        return closure() if callable(closure) else None

    def zero_grad(self, **_: Any) -> None:
        pass

    def toggle_model(self, **_: Any) -> Any:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name, self.own) if name == "optimizer" else getattr(self.own, name)


def _idle_optimizers(inputs: Inputs, which: int, *_: Any, **__: Any) -> Any:
    """Stand in for ``LightningModule.optimizers`` (``which`` 0) and ``lr_schedulers`` (1)."""
    found = [_Idle(each) for each in configured_optimizers(inputs)[which]]
    return found[0] if len(found) == 1 else found or None


def _manual_step(inputs: Inputs, training_step: Callable[[Any], Any], batch: Any) -> Tensor:
    """Return the sum of the losses in ``manual_backward``, so that the graphs of all are alive at once."""
    module, losses = inputs.module, list[Tensor]()
    own = dict.fromkeys(("clip_gradients", "toggle_optimizer", "untoggle_optimizer"), lambda *a, **k: None)
    module.__dict__ |= own | {"manual_backward": lambda loss, *a, **k: losses.append(loss)}
    training_step(batch)
    if not losses:
        raise ConfigurationError("the manual training_step calls manual_backward on no loss")
    return torch.stack([loss.float() for loss in losses]).sum()


def configured_optimizers(inputs: Inputs) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Return optimizers and schedules of ``configure_optimizers`` over fake tensors.

    Several optimizers are allowed in manual optimization alone.
    """
    try:
        with inputs.mode:
            found: Any = inputs.module.configure_optimizers()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"configure_optimizers fails outside of a run: {told}") from error
    apart = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list)
    given, schedules = map(_listed, found if apart else (found, []))
    schedules += [each["lr_scheduler"] for each in given if isinstance(each, Mapping) and "lr_scheduler" in each]
    optimizers: list[Any] = [each.get("optimizer") if isinstance(each, Mapping) else each for each in given]
    several = len(optimizers) > 1 and inputs.module.automatic_optimization
    if several or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise ConfigurationError("configure_optimizers returns no optimizer, or several")
    return optimizers, [each["scheduler"] if isinstance(each, Mapping) else each for each in schedules]


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def facts_of_several(
    optimizers: Sequence[torch.optim.Optimizer], traced: Sequence[OptimizerFacts], master: torch.dtype
) -> OptimizerFacts:
    """Return the facts of the optimizer with the most state, with the temporary bytes of the largest step."""
    sizes = [sum(p.numel() for group in o.param_groups for p in group["params"] if p.requires_grad) for o in optimizers]
    made = max(facts.temporary * size for facts, size in zip(traced, sizes, strict=True))
    most = max(traced, key=lambda facts: facts.state_bytes([1024], master))
    largest = max(1, *sizes)
    return replace(most, temporary=made / largest, share=largest / max(1, sum(sizes)))


def optimizer_facts(inputs: Inputs) -> OptimizerFacts:
    """Trace a step of new optimizers over master weights.

    Memory is counted by one rule for all parameters, so of several optimizers the one with the most state counts.
    """
    master = inputs.strategy.policy.master

    def cast(tensor: Tensor) -> Tensor:
        return tensor.detach().to(master) if tensor.requires_grad and tensor.is_floating_point() else tensor

    with inputs.mode:
        restore = replace_tensors(inputs.module, cast)
    try:
        optimizers, _ = configured_optimizers(inputs)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            # On GPUs torch's optimizers step all tensors at once by default.
            if "foreach" in group and not group["foreach"] and not group.get("fused"):
                group["foreach"] = group["foreach"] is None
        traced = [trace_optimizer(inputs.module, optimizer, inputs.mode) for optimizer in optimizers]
        with fake.fake_world(inputs.nodes.ranks):
            aligned = inputs.strategy.aligned
            whole = any(probe(each, dtype=master, aligned=aligned, alone=True).full for each in optimizers)
        return replace(facts_of_several(optimizers, traced, master), whole=whole)
    finally:
        restore()
