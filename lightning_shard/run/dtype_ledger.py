"""Measure a fit's dtypes in its first step, on every engine, and check the aligned contract."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_shard.engines.engine import Engine
from lightning_shard.engines.replicated import differing_replicas
from lightning_shard.errors import ConfigurationError
from lightning_shard.precision.float8 import multiplies_in
from lightning_shard.precision.ledger import STATE, Entry, Kind, Ledger, contract_error, violations
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.names import named_parameters, parameter_names

_COMPARED = 3
"""Steps of each optimizer after which replicas are compared, which waits for the device. Later only saves do."""

_PARTED = (
    "Ranks have other values of {}, of which each has a replica: every value that enters a step or is written to a "
    "parameter (a loss, a learning rate, gradients that a hook changes, random numbers) must be the same on every rank."
    " Reduce it over ranks first, as self.all_gather(loss).mean() does, and run backward by self.manual_backward(loss)."
)


class DtypeLedger:
    """Reads the dtypes of a fit's tensors, and asks the engine for the dtype of the reduction.

    It changes no number. Its hooks are on the optimizers alone, in the first steps. In these steps and before saves it
    also compares replicas. All ranks call each method.
    """

    def __init__(self, module: nn.Module, engine: Engine, policy: PrecisionPolicy, *, aligned: bool) -> None:
        """Read the loaded dtypes, before ``engine`` prepares ``module``. ``aligned``: check the contract."""
        self._module, self._engine, self._policy, self._aligned = module, engine, policy, aligned
        self._steps: dict[int, int] = {}  # By the ``id`` of an optimizer.
        self._entries: dict[str, Entry] = {}
        self._losses: set[torch.dtype] = set()
        self._reduced_in: frozenset[torch.dtype] = frozenset()
        self._optimizers: list[Optimizer] = []
        self._stepped: list[Optimizer] = []  # In the first step, without those that a loss scale skipped.
        self._undo: list[Callable[[], None]] = []
        self._read_module("loaded")

    def read_prepared(self, optimizers: Iterable[Optimizer]) -> None:
        """Read the prepared module and its optimizers. PrecisionContractError on all ranks, if ``aligned``."""
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            for name, parameter in self._parameters(optimizer):
                self._add(name, "optimizer", parameter)
        self._read_module("prepared")
        self._reduced_in = frozenset(self._engine.reduction_dtypes())
        self._hold_contract("at the start of the fit")
        self._undo = [optimizer.register_step_post_hook(self._read_step).remove for optimizer in self._optimizers]

    def _read_module(self, stage: str) -> None:
        steps_masters = any(self._engine.stepped_parameters(o) is not None for o in self._optimizers)
        for name, kind, tensor in _named_tensors(self._module):
            entry = self._entries.setdefault(name, Entry(kind=kind))
            if stage != "loaded" and kind in ("trainable", "frozen") and steps_masters:
                continue
            # A step of several optimizers freezes the parameters of the others for a while.
            if stage != "step" or kind == "trainable":
                entry.kind = kind
            entry.add(stage, tensor.dtype)

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        masters = self._engine.stepped_parameters(optimizer)
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
        """Read the gradients, parameters and state of an optimizer after its step."""
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
        # A tensor may be wrong on one rank alone. All raise, so that none waits for another.
        found = list(dict.fromkeys(violation for rank in Ranks.of().gather(own) for violation in rank))
        if found:
            self.remove_hooks()
            raise contract_error(found, when)

    def read_backward(self, loss: Tensor, *, accumulates: bool) -> None:
        """Read the dtypes of ``loss`` and of accumulated gradients."""
        if self._undo:
            self._losses.add(loss.dtype)
            for name, gradient in self._engine.accumulated().items() if accumulates else ():
                self._add(name, "accumulated", gradient)

    def run_step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[..., Any]) -> Any:
        """Run ``step(closure=...)``, and read and check the first steps. PrecisionContractError if ``aligned``."""
        result = self._run_read_step(optimizer, closure, step) if self._undo else step(closure=closure)
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps <= _COMPARED and (found := self._parted()):
            raise ConfigurationError(f"{_PARTED.format(found)} {type(optimizer).__name__} stepped them last.")
        return result

    def _parted(self) -> str | None:
        """First parameter whose replicas differ between ranks."""
        group = self._engine.replicas()
        if group is None:
            return None
        trained = [(name, p) for name, p in named_parameters(self._module).items() if p.requires_grad]
        # Each group of replicas has its own shards.
        differing = differing_replicas((p for _, p in trained), group)
        found = next((each for each in Ranks.of().gather(differing) if each), None)
        return None if found is None else trained[found[0]][0]

    def warn_of_parted_replicas(self) -> None:
        if found := self._parted():
            rank_zero_warn(_PARTED.format(found))

    def _run_read_step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[..., Any]) -> Any:
        has_gradients = False

        def noting_closure() -> Any:
            nonlocal has_gradients
            result = closure()
            has_gradients = True
            return result

        try:
            result = step(closure=noting_closure)
        except RuntimeError:
            if has_gradients:
                # torch's own message on mixed dtypes names no parameter.
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
                self.remove_hooks()
                self._report(self.measured())
        return result

    def _report(self, ledger: Ledger) -> None:
        """One line if all dtypes are as asked. Else, and under ``--verbose``, the table."""
        found = violations(ledger, self._policy)
        text = (
            f"dtypes, measured on {len(ledger.entries)} tensors in the first step, are as asked: {self._policy.text()}"
        )
        if found or logging.getLogger("lightning_shard").isEnabledFor(logging.DEBUG):
            text = "\n".join([ledger.table(), *(f"not as asked: {violation}" for violation in found[:3])])
        rank_zero_info(text)

    def remove_hooks(self) -> None:
        while self._undo:
            self._undo.pop()()

    def measured(self) -> Ledger:
        """The ledger so far. It is complete after the first optimizer step."""
        return Ledger(entries=self._entries, reduced_in=self._reduced_in, loss=frozenset(self._losses))


def _named_tensors(root: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    """Floating-point parameters and metric states, and all buffers."""
    found: list[tuple[str, Kind, Any]] = [
        (name, "trainable" if parameter.requires_grad else "frozen", parameter)
        for parameter, name in parameter_names(root).items()
    ]
    found += [(name, "buffer", buffer) for name, buffer in root.named_buffers()]
    for fqn, metric in ((fqn, module) for fqn, module in root.named_modules() if isinstance(module, Metric)):
        for state, value in metric.metric_state.items():
            values = value if isinstance(value, list) else [value]
            found += [(f"{fqn}.{state}", "metric state", each) for each in values]
    for name, kind, tensor in found:
        floats = isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())
        if kind == "buffer" or floats:
            yield name, kind, tensor
