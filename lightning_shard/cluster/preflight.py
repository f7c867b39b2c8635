"""The comparison of all processes before there is a process group, so that an error names the difference.

They meet at the store over which the group is made next, with a timeout of its own. Rank 0 reads each rank's versions
and settings and writes one verdict, which every rank raises.
"""

import json
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_shard.errors import ConfigurationError
from lightning_shard.text import listed

_KEYS = 512  # in one request. One with 16,384 is never answered (torch 2.13).


def multi_get(store: Store, keys: Sequence[str]) -> list[bytes]:
    return [value for part in _parts(keys) for value in store.multi_get(part)]


def multi_set(store: Store, keys: Sequence[str], value: str) -> None:
    for part in _parts(keys):
        store.multi_set(part, [value] * len(part))  # type: ignore[attr-defined]


def wait_for(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Wait ``seconds`` for all keys. Returns the missing ones."""
    deadline = time.monotonic() + seconds
    try:
        for part in _parts(keys):
            store.wait(part, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError:
        return [key for key in keys if not store.check([key])]
    return []


def _parts(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[first : first + _KEYS]) for first in range(0, len(keys), _KEYS)]


_CONNECTIONS = 2  # of each rank to the store, for the process group and for `RankWatch`
_OWN_FILES = 1000  # of rank 0 itself
_FOLDER_SECONDS = 5.0  # for a network file system to show a new file on another node


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The store's address and this process' rank."""

    address: str
    port: int
    rank: int
    world_size: int
    agent: str | None = None  # The attempt, if a torchrun keeps the store in its own process over restarts.


def attempt_of(environ: Mapping[str, str], world_size: int) -> str | None:
    """`Rendezvous.agent`. The world size is part of it: torchrun counts no restart if nodes come or go."""
    keeps = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-{world_size}" if keeps else None


def connect_store(at: Rendezvous, seconds: float) -> Store:
    """The store that rank 0 (or torchrun) keeps. ConfigurationError: no such host, a taken port, or no answer."""
    if not 0 < at.port < 65536:
        raise ConfigurationError(f"MASTER_PORT is {at.port}, but must be from 1 to 65535.")
    here = f"[rank {at.rank} on {socket.gethostname()}]"
    try:
        socket.getaddrinfo(at.address, at.port)
    except OSError as error:
        raise ConfigurationError(
            f"{here} the main address {at.address!r} can't be resolved "
            f"({error.strerror}). Set MASTER_ADDR to a name or an address of rank 0's node that all know."
        ) from error
    deadline = time.monotonic() + seconds
    keeps = at.rank == 0 and at.agent is None
    if keeps:
        _allow_connections(at.world_size)
    found: list[Store | RuntimeError] = []

    def make() -> None:
        # torch tries twice. A thread that still tries when the interpreter ends would abort the process.
        timeout = timedelta(seconds=max(1.0, (deadline - time.monotonic()) / 3))
        try:
            # Waiting for workers would end in an error that does not name the missing ranks.
            store = TCPStore(
                at.address, at.port, at.world_size, is_master=keeps, timeout=timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            found.append(error)
        else:
            store.set_timeout(timedelta(seconds=seconds))
            found.append(store)

    if keeps or _listens(at, deadline):
        # torch waits for ever if another program listens there.
        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        thread.join(max(1.0, deadline - time.monotonic()))
    store = found[0] if found else RuntimeError(f"no answer in {seconds:g} s")
    if isinstance(store, RuntimeError) and keeps:
        raise ConfigurationError(
            f"{here} port {at.port} can't be listened on, most likely since another "
            f"process does. Set MASTER_PORT to a free one. ({str(store).splitlines()[0]})"
        ) from store
    if isinstance(store, RuntimeError):
        raise ConfigurationError(
            f"{here} rank 0 did not answer at {at.address}:{at.port} in "
            f"{seconds:g} s (init_timeout_seconds): it has not started or has failed (see its own log), or a firewall "
            "is between the nodes, or MASTER_ADDR is another host."
        ) from store
    return store if at.agent is None else PrefixStore(f"/worker/attempt_{at.agent}", store)


def _listens(at: Rendezvous, deadline: float) -> bool:
    """Whether the store's keeper listens before the deadline. torch's own attempts print C++ frames and abort."""
    pause = 0.05
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((at.address, at.port), timeout=left).close()
        except OSError:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 1.0)
        else:
            return True
    return False


def _allow_connections(ranks: int) -> None:
    """Raise this process' limit of open files if needed. ConfigurationError: the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _CONNECTIONS * ranks + _OWN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigurationError(
            f"rank 0 on {socket.gethostname()} keeps {_CONNECTIONS} connections of each of {ranks} ranks, but may "
            f"have {hard} files open. Raise the limit to {needed} (ulimit -n, or LimitNOFILE of the service that "
            "starts processes)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def compare_ranks(
    store: Store, at: Rendezvous, facts: dict[str, Any], seconds: float, folder: Path | None = None
) -> None:
    """Compare ``facts`` of all ranks, which all call it: the "node" and, in words, "versions" and "settings" that must
    be equal. A rank may be ``seconds`` late. Rank 0's ``folder`` of checkpoints has to be visible on all nodes. Every
    rank raises the same ConfigurationError, which names the first difference.
    """
    store, probe = PrefixStore("preflight", store), None
    if at.rank == 0:
        probe = None if folder is None else _make_probe(folder)
        store.set("probe", str(probe or ""))
    sees = bool(wait_for(store, ["probe"], 2 * seconds)) or _sees(store.get("probe").decode())
    # One text for all nodes, so that equal ones are read once.
    store.set(f"facts/{at.rank}", f"{facts['node']}\n{int(sees)}\n{json.dumps({**facts, 'node': ''})}")
    if at.rank == 0:
        try:
            verdict = _judge(store, at.world_size, seconds, folder)
        except BaseException as error:
            store.set("verdict", f"rank 0 failed in comparing the ranks: {type(error).__name__}: {error}")
            raise
        store.set("verdict", verdict)
        if probe is not None:
            probe.unlink(missing_ok=True)
    verdict = store.get("verdict").decode()
    if verdict:
        store.set(f"read/{at.rank}", "")
        if at.rank == 0:
            # It keeps the store. The others have to read the verdict before it ends.
            wait_for(store, [f"read/{rank}" for rank in range(at.world_size)], 5.0)
        raise ConfigurationError(verdict)


def _judge(store: Store, size: int, seconds: float, folder: Path | None) -> str:
    """On rank 0: the error of all ranks, or ""."""
    keys = [f"facts/{rank}" for rank in range(size)]
    if missing := wait_for(store, keys, seconds + (0.0 if folder is None else _FOLDER_SECONDS)):
        numbers = listed([int(key.partition("/")[2]) for key in missing], most=8)
        return (
            f"{len(missing)} of {size} ranks did not connect in {seconds:g} s (init_timeout_seconds): {numbers}. They "
            "have not been started, or failed before (see their own logs). Slow imports need a longer timeout."
        )
    told = [value.split(b"\n", 2) for value in multi_get(store, keys)]
    read = {text: json.loads(text) for text in {text for _, _, text in told}}
    facts = [{**read[text], "node": node.decode()} for node, _, text in told]
    if len(read) > 1 and (different := _difference(facts)):
        return different
    if blind := [rank for rank, (_, sees, _) in enumerate(told) if sees == b"0"]:
        return (
            f"{folder} is not one folder for all nodes: a file of rank 0 on {facts[0]['node']} is not seen by "
            f"{_ranks(blind, facts)}. Set default_root_dir to a folder on a file system that all nodes share."
        )
    return ""


def _difference(facts: Sequence[Mapping[str, Any]]) -> str:
    for kind, advice in (
        ("versions", "Install the same versions on all nodes."),
        ("settings", "All ranks need the same configuration: look for values that depend on the rank or the node."),
    ):
        for name in sorted({name for fact in facts for name in fact.get(kind, {})}):
            values = [fact.get(kind, {}).get(name, "none") for fact in facts]
            others = [rank for rank, value in enumerate(values) if value != values[0]]
            if others:
                return (
                    f"{name} differs between ranks: {values[0]} on rank 0 ({facts[0]['node']}), {values[others[0]]} on "
                    f"{_ranks(others, facts)}. {advice}"
                )
    return ""


def _ranks(ranks: Sequence[int], facts: Sequence[Mapping[str, Any]]) -> str:
    named = (f"{rank} ({facts[rank]['node']})" for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(named, most=4)}"


def _make_probe(folder: Path) -> Path | None:
    """Create a file in ``folder``, which is created too. None if rank 0 can't write."""
    path = folder / f".preflight-{secrets.token_hex(6)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return None
    return path.resolve()


def _sees(probe: str) -> bool:
    deadline = time.monotonic() + _FOLDER_SECONDS
    while probe and time.monotonic() < deadline:
        folder, name = os.path.split(probe)
        with suppress(OSError):
            # A client asks the server once for a new name. Listing the folder asks it again.
            if os.path.exists(probe) or name in os.listdir(folder):
                return True
        time.sleep(0.2)
    return not probe
