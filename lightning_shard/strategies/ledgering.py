"""Measuring a fit's dtypes in its first step, and holding the aligned contract against them, on every engine alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard import _lightning
from lightning_shard.precision.ledger import Ledger, Recorder, contract_error, violations
from lightning_shard.ranks import Ranks
from lightning_shard.strategies.checkpointing import CheckpointingStrategy


class LedgerStrategy(CheckpointingStrategy):
    """Keeps the ledger of a fit; a subclass says when its set-up begins and ends."""

    aligned: bool
    """Whether the contract is held."""

    _recorder: Recorder | None = None

    @property
    def ledger(self) -> Ledger | None:
        """The dtypes measured in this fit, complete after its first optimizer step; None where nothing was fitted."""
        return None if self._recorder is None else self._recorder.ledger()

    def _measured(self) -> dict[str, Any]:
        return {} if self._recorder is None else self._recorder.ledger().to_json()

    def _begin_ledger(self, module: LightningModule) -> None:
        """Read what was loaded, before the engine prepares it."""
        self._recorder = Recorder(module, stepped=self._stepped)
        self._recorder.tensors("loaded")

    def _stepped(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]] | None:
        """FQN and tensor of what ``optimizer`` steps, where that is not the module's parameters but masters of them."""
        return None

    def _check_start(self) -> None:
        """Read what the engine left and what the optimizers hold. All ranks call it.

        Raises:
            PrecisionContractError: under ``aligned``, on every rank alike.
        """
        if self._recorder is not None:
            self._recorder.groups(self.optimizers)
            self._recorder.tensors("prepared")
            self._hold_contract("at the start of the fit")

    def _hold_contract(self, when: str) -> None:
        if not self.aligned or self._recorder is None:
            return
        own = violations(self._recorder.ledger(), self.policy)
        # A tensor may be wrong on one rank alone; all raise, so that none waits for another.
        found = list(dict.fromkeys(violation for rank in Ranks.of().gather(own) for violation in rank))
        if found:
            self._stop_ledger()
            raise contract_error(found, when)

    def on_train_start(self) -> None:
        """Install the hooks for the first step; see also the parent's."""
        super().on_train_start()
        if self._recorder is not None:
            self._recorder.start()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward, in the first step with an eye on its collectives."""
        if self._recorder is None or not self._recorder.recording:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        with self._recorder.backward():
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization and _lightning.should_accumulate(self.lightning_module.trainer):
            self._recorder.held(self._held_gradients())
        return loss

    def _watching_collectives(self) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.collectives()

    def _held_gradients(self) -> Iterable[tuple[str, Tensor]]:
        """The gradients that wait for those of further micro-batches, by their parameters' FQNs."""
        assert self.lightning_module is not None
        return [(n, p.grad) for n, p in self.lightning_module.named_parameters() if p.grad is not None]

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, and after the first time complete the ledger and check it. All ranks call it.

        Raises:
            PrecisionContractError: under ``aligned``, on every rank alike.
        """
        recorder = self._recorder
        if recorder is None or not recorder.recording:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        has_gradients = False

        def noting_closure() -> Any:
            nonlocal has_gradients
            result = closure()
            has_gradients = True
            return result

        try:
            result = super().optimizer_step(optimizer, noting_closure, model, **kwargs)
        except Exception:
            if has_gradients:
                # torch's own message of two dtypes that do not go together names no parameter.
                recorder.gradients()
                self._hold_contract("in the first optimizer step")
            raise
        if recorder.has_stepped(optimizer):
            recorder.tensors("step")
            self._hold_contract("in the first optimizer step")
            if recorder.finished():
                self._stop_ledger()
                rank_zero_info(recorder.ledger().table())
        return result

    def _stop_ledger(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()

    def on_exception(self, exception: BaseException) -> None:
        """Leave no hook behind."""
        self._stop_ledger()
        super().on_exception(exception)
