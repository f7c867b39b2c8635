"""The interface that gloo listens on."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from lightning_shard.cluster import network


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
