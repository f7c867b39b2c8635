"""Measuring a fit's dtypes in its first step, and holding the aligned contract against them, on every engine."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.engines.engine import Engine
from lightning_shard.engines.replicated import parted
from lightning_shard.errors import ConfigurationError
from lightning_shard.precision.ledger.record import Ledger, contract_error, violations
from lightning_shard.precision.ledger.recorder import Recorder
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.names import named_parameters

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

    def start_of_training(self) -> None:
        """Install the hooks for the first step."""

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Note the dtype of ``loss``, and watch the collectives of its backward pass."""
        return nullcontext()

    def after_backward(self, *, accumulates: bool) -> None:
        """Note the gradients that wait for those of further micro-batches."""

    def reduction(self) -> AbstractContextManager[None]:
        """Watch collectives that reduce gradients outside of a backward pass."""
        return nullcontext()

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
    def __init__(self, module: nn.Module, engine: Engine, policy: PrecisionPolicy, *, aligned: bool) -> None:
        """Read what was loaded, before ``engine`` prepares ``module``; ``aligned``: the contract is held."""
        self._module, self._engine, self._policy, self._aligned = module, engine, policy, aligned
        self._steps: dict[int, int] = {}  # Of each optimizer, by its ``id``.
        self._recorder = Recorder(module, stepped=lambda optimizer: engine.tensors.stepped(optimizer))
        self._recorder.tensors("loaded")

    def start_of_fit(self, optimizers: Iterable[Optimizer]) -> None:
        self._recorder.groups(optimizers)
        self._recorder.tensors("prepared")
        self._hold_contract("at the start of the fit")

    def _hold_contract(self, when: str) -> None:
        if not self._aligned:
            return
        own = violations(self._recorder.ledger(), self._policy)
        # A tensor may be wrong on one rank alone; all raise, so that none waits for another.
        found = list(dict.fromkeys(violation for rank in Ranks.of().gather(own) for violation in rank))
        if found:
            self.stop()
            raise contract_error(found, when)

    def start_of_training(self) -> None:
        self._recorder.start()

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        return self._recorder.backward(loss)

    def after_backward(self, *, accumulates: bool) -> None:
        if self._recorder.recording and accumulates:
            self._recorder.held(self._engine.tensors.accumulated())

    def reduction(self) -> AbstractContextManager[None]:
        return self._recorder.collectives()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        result = self._recorded(optimizer, closure, step) if self._recorder.recording else step(closure)
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

    def _recorded(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]
    ) -> Any:
        recorder = self._recorder
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
                recorder.gradients()
                self._hold_contract("in the first optimizer step")
            raise
        if recorder.has_stepped(optimizer):
            recorder.tensors("step")
            self._hold_contract("in the first optimizer step")
            if recorder.finished():
                self.stop()
                rank_zero_info(self._report(recorder.ledger()))
        return result

    def _report(self, ledger: Ledger) -> str:
        """One line where all is as asked; else, and under ``--verbose``, the table."""
        found = violations(ledger, self._policy)
        if found or logging.getLogger("lightning_shard").isEnabledFor(logging.DEBUG):
            return "\n".join([ledger.table(), *(f"not as asked: {violation.text()}" for violation in found[:3])])
        count, asked = len(ledger.entries), self._policy.text()
        return f"dtypes, measured on {count} tensors in the first step, are as asked: {asked}"

    def stop(self) -> None:
        self._recorder.stop()

    def measured(self) -> Ledger | None:
        return self._recorder.ledger()
