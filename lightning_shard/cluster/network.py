"""The network interface of gloo, which runs on GPUs need as well as NCCL, and forks while gloo's threads run.

Before Python 3.12 a forked child, such as a worker of a DataLoader, waits forever if another thread is about to enter
the interpreter at that moment: it begins with a lock of the runtime taken (seen in ``_PyThreadState_DeleteExcept``).
gloo's threads enter it to release a tensor whose Python object has gone, right after a collective. Loaders start then.
"""

import os
import socket
import sys
import time
from collections.abc import MutableMapping

import psutil
import torch.distributed as dist

_ELSEWHERE = "198.51.100.1"  # RFC 5737: of no host, but routed as any other
_HERE = ("localhost", "127.0.0.1", "::1")


def prepare_gloo(address: str, environ: MutableMapping[str, str], *, gpu: bool) -> None:
    """Have gloo listen on the interface towards ``address``, the main process's. By itself gloo takes the one of this
    host's name: loopback if ``/etc/hosts`` says 127.0.1.1, as on Debian, and other nodes wait for ever. Entries of
    ``environ`` stay. With ``gpu``, gloo carries control messages and connects two ranks when they first use it.
    """
    if "GLOO_SOCKET_IFNAME" not in environ and (name := interface_towards(address)) is not None:
        environ["GLOO_SOCKET_IFNAME"] = name
    if gpu:
        # 539 in place of 16,787 descriptors for the groups of 128 ranks.
        environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def interface_towards(address: str) -> str | None:
    """The interface by which this host reaches ``address``, or any host if that is its own. None if unknown."""
    own = _source(address)
    if own is not None and own.startswith("127.") and address not in _HERE:
        own = _source(_ELSEWHERE)
    if own is None or own.startswith("127."):
        return None
    return next(
        (name for name, found in psutil.net_if_addrs().items() if own in [each.address for each in found]), None
    )


def _source(address: str) -> str | None:
    """The address from which this host would send to ``address``. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


_SECONDS = 0.01  # far more than a thread needs to release a tensor
_registered = False


def let_threads_finish_before_forks() -> None:
    """Have later forks of this process wait a moment without the interpreter's lock, before Python 3.12."""
    global _registered
    if not _registered and sys.version_info < (3, 12):
        _registered = True
        os.register_at_fork(before=_let_threads_finish)


def _let_threads_finish() -> None:
    if dist.is_available() and dist.is_initialized():
        time.sleep(_SECONDS)
