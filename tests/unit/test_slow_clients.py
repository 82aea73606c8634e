"""Clients that send a byte of their headers a second, or half a body: each server cuts them off, without a word."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from tandem.common import web
from tests.harness.web_servers import SERVERS, WAIT_S, Address, Server, web_server

BYTE_S = 1.0
"""Pause after each byte: the connection is never idle for as long as headers may take."""
PATHS = ("/", "/v1/chat/completions", "/metrics", "/api/runs")


def send(connection: socket.socket, data: bytes) -> bool:
    """Send bytes; return whether the connection is still there."""
    try:
        connection.sendall(data)
        connection.settimeout(0.0)
        return connection.recv(1 << 16) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        connection.settimeout(WAIT_S)


def lasted_s(at: Address) -> float:
    """Send headers slowly until the server ends the connection; return how long it took."""
    began = time.monotonic()
    with socket.create_connection(at, timeout=WAIT_S) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        while send(connection, b"x"):
            assert time.monotonic() - began < web.HEADERS_S + WAIT_S, "the server still listens"
            time.sleep(BYTE_S)
    return time.monotonic() - began


@pytest.mark.parametrize("kind", SERVERS)
def test_a_byte_of_the_headers_a_second_ends_the_connection(kind: str) -> None:
    with web_server(kind) as server:
        lasted = lasted_s(server.at)
        assert lasted > web.HEADERS_S - BYTE_S, "a client may take some time"
        assert server.ask() == 200


@pytest.mark.parametrize("kind", SERVERS)
def test_a_body_that_breaks_off_is_no_traceback_of_any_server(kind: str) -> None:
    with web_server(kind) as server:  # which looks for tracebacks at its end
        for path in PATHS:
            for reset in (False, True):
                break_off(server, path, reset=reset)
        assert server.ask() == 200


def break_off(server: Server, path: str, *, reset: bool) -> None:
    """Send half a body, and close or reset the connection."""
    headers = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with contextlib.closing(socket.create_connection(server.at, timeout=WAIT_S)) as connection:
        connection.sendall(headers.encode() + b"{")
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        time.sleep(0.05)  # so that the server waits for the rest
