"""Connections of strangers that say nothing, which the kernel keeps from those who listen."""

from __future__ import annotations

import datetime
import socket

from torch.distributed import TCPStore

from tandem.common.network import defer_silent, list_listening


def test_a_listener_gets_a_connection_once_it_has_said_something() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        defer_silent([listener])
        listener.settimeout(0.3)
        with socket.create_connection(listener.getsockname()) as silent:
            try:
                listener.accept()[0].close()
            except TimeoutError:
                silent.sendall(b"hello")
                listener.settimeout(20.0)
                accepted, _ = listener.accept()
                with accepted:
                    assert accepted.recv(5) == b"hello"
            else:
                raise AssertionError("a silent connection was accepted")


def test_a_library_s_own_listener_is_found_and_goes_on_to_serve_its_clients() -> None:
    before = {each.getsockname() for each in list_listening()}
    timeout = datetime.timedelta(seconds=20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach(),
                         use_libuv=False, timeout=timeout)  # fmt: skip
    found = {each.getsockname() for each in list_listening()}
    assert found - before == {("127.0.0.1", port)}
    defer_silent(list_listening())
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
    client = TCPStore("127.0.0.1", port, is_master=False, use_libuv=False, timeout=timeout)
    client.set("key", "value")
    assert store.get("key") == b"value"
    for each in silent:
        each.close()
