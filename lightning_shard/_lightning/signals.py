"""Lightning's signal handlers, and the end of a run, which it reaches in their connector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_shard._lightning.replaced import Replacements


def leave_signals_alone(replacements: Replacements, trainer: Trainer) -> None:
    """Keep Lightning from installing its signal handlers in this run.

    They save, requeue and broadcast inside the handler, on whatever rank and in whatever line the signal comes. What
    they note is broadcast by rank 0 before every batch, and read: a wait for all ranks and for the device in every
    step, which goes with them.
    """
    # Nothing was installed, and so the connector's own teardown has nothing to put back.
    replacements.replace(_connector(trainer), "register_signal_handlers", lambda: None)
    replacements.replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def at_end_of_run(replacements: Replacements, trainer: Trainer, hook: Callable[[], None]) -> None:
    """Call ``hook`` at the end of this run, however it ends, after the strategy's teardown; then restore all.

    Call this before anything else is replaced. What an earlier run left that did not come to its end is restored first.
    """
    replacements.restore()
    connector = _connector(trainer)
    teardown = connector.teardown

    def teardown_and_restore() -> None:
        try:
            teardown()
            hook()
        finally:
            replacements.restore()

    replacements.replace(connector, "teardown", teardown_and_restore)


def _connector(trainer: Trainer) -> Any:
    return trainer._signal_connector
