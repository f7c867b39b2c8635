"""How long a rank's main thread waits for other ranks, measured where the waiting is done."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from lightning_shard.private_names import require

require(dist, "_broadcast_coalesced", tested="torch 2.11 to 2.13")
require(Variable, "_execution_engine", tested="torch 2.11 to 2.13")

# Work.wait is what every collective that is called from Python ends in; the other is DDP's of buffers.
_WAITS: tuple[tuple[Any, str], ...] = ((dist.Work, "wait"), (dist, "_broadcast_coalesced"))


class Waiting:
    """Sums up ``seconds`` that the thread which made it waits in collectives, from then on until `detach`.

    With a backend of a GPU, `torch.distributed.Work.wait` does not stop the host, and nothing is counted.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()
        self._tail: tuple[float, float] | None = None
        # Held for the whole process, but counted in this thread alone.
        self._before = [(owner, name, getattr(owner, name)) for owner, name in _WAITS] if dist.is_available() else []
        for owner, name, wait in self._before:
            setattr(owner, name, self._timed(wait))

    @contextmanager
    def also(self) -> Generator[None, None, None]:
        """Count what is done in it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return wait(*args, **kwargs)
            with self.also():
                return wait(*args, **kwargs)

        return timed

    def before_backward(self, loss: Tensor) -> None:
        """Note when this rank's own backward pass is over: DDP then waits for its buckets, out of Python's sight."""

        def over() -> None:
            self._tail = time.perf_counter(), self.seconds

        if loss.requires_grad:
            # Called ahead of DDP's own callback, which is queued later.
            loss.register_hook(lambda _: Variable._execution_engine.queue_callback(over))

    def after_backward(self) -> None:
        """Count what came after the rank's own backward pass."""
        if self._tail is not None:
            start, seconds = self._tail
            self.seconds = seconds + time.perf_counter() - start
        self._tail = None

    def detach(self) -> None:
        while self._before:
            setattr(*self._before.pop())
