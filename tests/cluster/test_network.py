"""The interface that gloo listens on, and forks beside its threads."""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace

import psutil
import pytest

from lightning_shard.cluster import network
from tests.harness import run_distributed


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with loopback and two networks, whose own name resolves to loopback, as on Debian."""
    routes = {"here": "127.0.1.1", "localhost": "127.0.0.1", "node1": "10.0.0.2", network._ELSEWHERE: "192.168.0.2"}
    addresses = {"lo": "127.0.0.1", "ib0": "10.0.0.2", "eth0": "192.168.0.2"}
    interfaces = {name: [SimpleNamespace(address=address)] for name, address in addresses.items()}
    monkeypatch.setattr(network, "_source", routes.get)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("address", "name"), [("node1", "ib0"), ("here", "eth0"), ("localhost", None), ("nowhere", None)]
)
def test_the_interface_that_reaches_the_main_process(address: str, name: str | None) -> None:
    assert network.interface_towards(address) == name
    environ: dict[str, str] = {}
    network.prepare_gloo(address, environ, gpu=False)
    assert environ == ({} if name is None else {"GLOO_SOCKET_IFNAME": name})


@pytest.mark.usefixtures("host")
def test_what_the_user_set_stays() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "own", "TORCH_GLOO_LAZY_INIT": "0"}
    network.prepare_gloo("node1", environ, gpu=True)
    assert environ == {"GLOO_SOCKET_IFNAME": "own", "TORCH_GLOO_LAZY_INIT": "0"}
    environ = {}
    network.prepare_gloo("node1", environ, gpu=True)
    assert environ == {"GLOO_SOCKET_IFNAME": "ib0", "TORCH_GLOO_LAZY_INIT": "1"}


def test_of_this_host() -> None:
    assert network.interface_towards("127.0.0.1") is None
    assert network.interface_towards("::2") is None
    for name, found in psutil.net_if_addrs().items():
        for address in (each.address for each in found if each.family == socket.AF_INET):
            assert network.interface_towards(address) == (None if address.startswith("127.") else name)


def _fork() -> list[float]:
    slept: list[float] = []
    network.let_threads_finish_before_forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network.time, "sleep", slept.append)
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return slept


def test_threads_of_the_backend_may_finish_before_a_fork() -> None:
    """Else worker processes of loaders hang now and then."""
    assert run_distributed(_fork, 1) == [[network._SECONDS] if sys.version_info < (3, 12) else []]
