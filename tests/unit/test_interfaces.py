"""Collective libraries listen on the interface of the run, of either version of IP."""

from __future__ import annotations

import os
import socket

import psutil
import pytest
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from tandem.common.network import is_loopback, keep_to_interface

VARIABLE = "GLOO_SOCKET_IFNAME"


def addresses() -> list[tuple[str, str]]:
    """Return the addresses of this host, each with its interface."""
    return [
        (each.address.partition("%")[0], name)
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]


def test_the_interface_of_each_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses()
    for address, name in addresses():
        if is_loopback(address):
            name = "lo"
        monkeypatch.setenv(VARIABLE, "the user's")
        keep_to_interface(address, VARIABLE)
        assert os.environ[VARIABLE] == "the user's"
        monkeypatch.delenv(VARIABLE)
        keep_to_interface(address, VARIABLE)
        assert os.environ[VARIABLE] == name, address


def test_gloo_listens_on_the_interface_of_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    keep_to_interface("127.0.0.1", VARIABLE)
    before = {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    group = ProcessGroupGloo(PrefixStore("alone", HashStore()), 0, 1)
    after = {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert after - before, "it listens"
    assert all(is_loopback(at.ip) for at in after - before)
    del group


def test_only_addresses_and_names_of_this_machine_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST.")))
    assert not any(map(is_loopback, ("", "evil.example", "localhost.evil.example", "10.0.0.1", "::", "0.0.0.0", "1")))
