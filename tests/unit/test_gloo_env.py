"""Tests of the interface that gloo is told: none if its own choice, or the user's, is right."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from deepytorch_core.base import config
from deepytorch_core.network import addresses, gloo_env
from deepytorch_core.topology import model as topology


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what was set, in a job of nodes whose machines are called by a loopback address."""
    found: dict[str, str] = {}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(gloo_env, "_done", False)
    monkeypatch.setattr(config, "spans_nodes", lambda: True)
    monkeypatch.setattr(config, "set_where_unset", found.update)
    monkeypatch.setattr(addresses, "own_address", lambda: "10.1.2.3")
    nics = [
        SimpleNamespace(name="docker0", addresses=("172.17.0.1",)),
        SimpleNamespace(name="eth1", addresses=("fe80::1", "10.1.2.3")),
    ]
    monkeypatch.setattr(topology, "discover", lambda: SimpleNamespace(nics=nics))
    resolve(monkeypatch, "127.0.1.1")
    return found


def resolve(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        if not address:
            raise socket.gaierror(-2, "Name or service not known")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


# 192.0.2.0/24 is nobody's (RFC 5737).
@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "192.0.2.1", ""])
def test_a_name_that_leads_nowhere_is_replaced_by_the_interface_between_the_nodes(
    chosen: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    address: str,
) -> None:
    resolve(monkeypatch, address)
    gloo_env.before_gloo()
    assert chosen == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert "set GLOO_SOCKET_IFNAME=eth1" in capsys.readouterr().err
    chosen.clear()
    gloo_env.before_gloo()
    assert not chosen  # once is enough


def test_a_name_that_others_reach_stays(
    chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_is_own", lambda family, address: True)
    gloo_env.before_gloo()
    assert not chosen


def test_what_the_user_set_stays(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    gloo_env.before_gloo()
    assert not chosen


def test_one_node_has_no_need_of_it(
    chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "spans_nodes", lambda: False)
    gloo_env.before_gloo()
    assert not chosen


@pytest.mark.parametrize("address", ["10.9.9.9", None])
def test_without_an_interface_gloo_goes_by_its_own_choice(
    chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    def own_address() -> str:
        if address is None:
            raise OSError("the route to 127.0.0.1 leads back into this machine")
        return address

    monkeypatch.setattr(addresses, "own_address", own_address)
    gloo_env.before_gloo()
    assert not chosen
