"""Measuring a fit's dtypes in its first step, and holding the aligned contract against them, on every engine."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_shard.engines.engine import Engine
from lightning_shard.engines.replicated import parted
from lightning_shard.errors import ConfigurationError
from lightning_shard.precision.float8 import multiplies_in
from lightning_shard.precision.ledger import STATE, Entry, Kind, Ledger, contract_error, violations
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.names import named_parameters, parameter_names

_COMPARED = 3
"""Steps of each optimizer after which replicas are compared, which waits for the device; then saves do."""

_PARTED = (
    "Ranks have other values of {}, of which each has a replica: what enters a step or is written to a parameter "
    "(a loss, a learning rate, gradients that a hook changes, random numbers) must be the same on every rank. Reduce "
    "it over ranks first, as self.all_gather(loss).mean() does, and run backward by self.manual_backward(loss)."
)


class RunLedger:
    """What a strategy and its checkpoints ask of a ledger; this one, of a run that steps nothing, measures nothing."""

    def start_of_fit(self, optimizers: Iterable[Optimizer]) -> None:
        """Read what engine and optimizers hold; PrecisionContractError on all, if ``aligned``. All ranks call it."""

    def after_backward(self, loss: Tensor, *, accumulates: bool) -> None:
        """Note the dtypes of ``loss``, and of the gradients that wait for those of further micro-batches."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Step, and once complete the ledger and check it; PrecisionContractError if ``aligned``. All ranks call it."""
        return step(closure)

    def before_saving(self) -> None:
        """Warn of replicas that are not equal any more. All ranks call it."""

    def stop(self) -> None:
        """Leave no hook behind."""

    def measured(self) -> Ledger | None:
        """What was measured, complete after the first optimizer step; None where nothing was fitted."""
        return None


class FitLedger(RunLedger):
    """Reads dtypes of the module's tensors, of what its optimizers step, its gradients and their state, and asks the
    engine for that of the reduction. It changes no number, and has hooks on the optimizers alone, in the first steps.
    """

    def __init__(self, module: nn.Module, engine: Engine, policy: PrecisionPolicy, *, aligned: bool) -> None:
        """Read what was loaded, before ``engine`` prepares ``module``; ``aligned``: the contract is held."""
        self._module, self._engine, self._policy, self._aligned = module, engine, policy, aligned
        self._steps: dict[int, int] = {}  # Of each optimizer, by its ``id``.
        self._entries: dict[str, Entry] = {}
        self._losses: set[torch.dtype] = set()
        self._reduced_in: frozenset[torch.dtype] = frozenset()
        self._optimizers: list[Optimizer] = []
        self._stepped: list[Optimizer] = []  # In the first step; those that a loss scale skipped are not among them.
        self._undo: list[Callable[[], None]] = []
        self._read_module("loaded")

    def start_of_fit(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            for name, parameter in self._parameters(optimizer):
                self._add(name, "optimizer", parameter)
        self._read_module("prepared")
        self._reduced_in = frozenset(self._engine.reduction_dtypes())
        self._hold_contract("at the start of the fit")
        self._undo = [optimizer.register_step_post_hook(self._read_step).remove for optimizer in self._optimizers]

    def _read_module(self, stage: str) -> None:
        steps_masters = any(self._engine.tensors.stepped_parameters(o) is not None for o in self._optimizers)
        for name, kind, tensor in _named_tensors(self._module):
            entry = self._entries.setdefault(name, Entry(kind=kind))
            if stage != "loaded" and kind in ("trainable", "frozen") and steps_masters:
                continue
            # A step of several optimizers switches the parameters of the others off for a while.
            if stage != "step" or kind == "trainable":
                entry.kind = kind
            entry.add(stage, tensor.dtype)

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        masters = self._engine.tensors.stepped_parameters(optimizer)
        if masters is not None:
            yield from masters
            return
        names, index = parameter_names(self._module), self._optimizers.index(optimizer)
        for group, settings in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(settings["params"]):
                yield names.get(parameter, f"optimizer {index}, group {group}, parameter {position}"), parameter

    def _add(self, name: str, stage: str, tensor: LiveTensor) -> None:
        self._entries.setdefault(name, Entry(kind="not in the module")).add(stage, tensor.dtype)

    def _read_gradients(self, optimizer: Optimizer) -> None:
        for name, parameter in self._parameters(optimizer):
            if parameter.grad is not None:
                self._add(name, "gradient", parameter.grad)

    def _read_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note what ``optimizer`` has stepped; its gradients are still there."""
        self._read_gradients(optimizer)
        for name, parameter in self._parameters(optimizer):
            self._add(name, "step", parameter)
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    self._add(name, f"{STATE}{slot}", value)
        self._stepped.append(optimizer)

    def _read_products(self) -> None:
        names = parameter_names(self._module)
        for module in self._module.modules():
            if (dtype := multiplies_in(module)) is not None and isinstance(weight := module.weight, nn.Parameter):
                self._entries[names[weight]].add("product", dtype)

    def _hold_contract(self, when: str) -> None:
        if not self._aligned:
            return
        own = violations(self.measured(), self._policy)
        # A tensor may be wrong on one rank alone; all raise, so that none waits for another.
        found = list(dict.fromkeys(violation for rank in Ranks.of().gather(own) for violation in rank))
        if found:
            self.stop()
            raise contract_error(found, when)

    def after_backward(self, loss: Tensor, *, accumulates: bool) -> None:
        if self._undo:
            self._losses.add(loss.dtype)
            for name, gradient in self._engine.tensors.accumulated().items() if accumulates else ():
                self._add(name, "accumulated", gradient)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        result = self._read_around(optimizer, closure, step) if self._undo else step(closure)
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps <= _COMPARED and (found := self._parted()):
            raise ConfigurationError(f"{_PARTED.format(found)} {type(optimizer).__name__} stepped them last.")
        return result

    def _parted(self) -> str | None:
        """The first parameter that ranks do not have as replicas any more. All ranks call it."""
        group = self._engine.replicas()
        if group is None:
            return None
        trained = [(name, p) for name, p in named_parameters(self._module).items() if p.requires_grad]
        # Each group of replicas has its own shards.
        found = next((each for each in Ranks.of().gather(parted((p for _, p in trained), group)) if each), None)
        return None if found is None else trained[found[0]][0]

    def before_saving(self) -> None:
        if found := self._parted():
            rank_zero_warn(_PARTED.format(found))

    def _read_around(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]
    ) -> Any:
        has_gradients = False

        def noting_closure() -> Any:
            nonlocal has_gradients
            result = closure()
            has_gradients = True
            return result

        try:
            result = step(noting_closure)
        except RuntimeError:
            if has_gradients:
                # torch's own message of two dtypes that do not go together names no parameter.
                for each in self._optimizers:
                    self._read_gradients(each)
                self._hold_contract("in the first optimizer step")
            raise
        if optimizer in self._stepped:
            self._read_module("step")
            self._read_products()
            self._hold_contract("in the first optimizer step")
            stepped = set(self._stepped)
            if len(stepped) == len(self._optimizers) or len(self._stepped) > len(stepped):
                self.stop()
                rank_zero_info(self._report(self.measured()))
        return result

    def _report(self, ledger: Ledger) -> str:
        """One line where all is as asked; else, and under ``--verbose``, the table."""
        found = violations(ledger, self._policy)
        if found or logging.getLogger("lightning_shard").isEnabledFor(logging.DEBUG):
            return "\n".join([ledger.table(), *(f"not as asked: {violation.text()}" for violation in found[:3])])
        count, asked = len(ledger.entries), self._policy.text()
        return f"dtypes, measured on {count} tensors in the first step, are as asked: {asked}"

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def measured(self) -> Ledger:
        return Ledger(entries=self._entries, reduced_in=self._reduced_in, loss=frozenset(self._losses))


def _named_tensors(root: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    for parameter, name in parameter_names(root).items():
        if _counts(parameter):
            yield name, "trainable" if parameter.requires_grad else "frozen", parameter
    for name, buffer in root.named_buffers():
        yield name, "buffer", buffer
    for fqn, module in root.named_modules():
        if isinstance(module, Metric):
            for state, value in module.metric_state.items():
                for tensor in value if isinstance(value, list) else [value]:
                    if isinstance(tensor, Tensor) and _counts(tensor):
                        yield f"{fqn}.{state}", "metric state", tensor


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
