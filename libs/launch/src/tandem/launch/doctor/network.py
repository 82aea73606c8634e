"""The measurement of TCP, within this host or to another, and of the difference of two clocks.

A visitor sends `_HELLO`. The listener answers with its clock, takes bytes until the visitor ends its side, sends bytes
back for as many seconds, and closes. It keeps nothing and reveals nothing else. Any visitor that reaches the port can
make it do so, for `_LONGEST_S` at a time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec

from tandem.common.errors import ConfigError, TandemError

_HELLO = b"tandem doctor 1\n"
_CLOCK = struct.Struct("!d")
_CHUNK = 4 << 20
_MEASURE_S = 1.0
_LONGEST_S = 5.0
_SILENCE_S = 10.0
_GB = 1e9


class NetworkRate(msgspec.Struct, frozen=True):
    """The rates of one connection."""

    sent: float
    """GB/s to the peer."""
    received: float
    """GB/s from the peer."""
    clock_ahead_s: float
    """Lead of the peer's wall clock; accurate to half of a message's round trip."""

    @property
    def slower(self) -> float:
        """Rate of the slower direction."""
        return min(self.sent, self.received)


class ProbeServer:
    """A server that answers one visitor after another."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on an address. Raise `ConfigError` if that fails."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]

    def answer_next(self) -> str:
        """Wait for a visitor, answer it, and return its address."""
        connection, (address, *_) = self._socket.accept()
        with connection, contextlib.suppress(OSError, EOFError):  # its own loss, if a visitor breaks off
            connection.settimeout(_SILENCE_S)
            if _receive_exactly(connection, len(_HELLO)) == _HELLO:
                connection.sendall(_CLOCK.pack(time.time()))
                _take(connection)
                connection.sendall(b"." * len(_HELLO))  # all bytes have arrived
                _send(connection)
        return str(address)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def measure_peer(peer: str) -> NetworkRate:
    """Measure the connection to a `ProbeServer` at ``HOST:PORT``. Raise `TandemError` if that fails."""
    host, port = parse_address(peer)
    try:
        with socket.create_connection((host, port), _SILENCE_S) as connection:
            return _measure(connection)
    except (OSError, EOFError) as error:
        raise TandemError(f"--peer {peer}: {getattr(error, 'strerror', None) or error or 'it broke off'}") from error


def measure_loopback() -> NetworkRate:
    """Measure a connection within this host."""
    listener = ProbeServer("127.0.0.1", 0)
    answering = threading.Thread(target=listener.answer_next, name="loopback", daemon=True)
    answering.start()
    try:
        return measure_peer(f"127.0.0.1:{listener.port}")
    finally:
        answering.join(_SILENCE_S)
        listener.close()


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raise `ConfigError` if `text` is not of this form."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address: it should be HOST:PORT")
    return host.strip("[]"), int(port)


def _measure(connection: socket.socket) -> NetworkRate:
    before = time.time()
    connection.sendall(_HELLO)
    (clock,) = _CLOCK.unpack(_receive_exactly(connection, _CLOCK.size))
    ahead_s = clock - (before + time.time()) / 2
    began = time.perf_counter()
    sent = _send(connection)
    _receive_exactly(connection, len(_HELLO))
    sent_rate = sent / (time.perf_counter() - began) / _GB
    began = time.perf_counter()
    received = _take(connection)
    return NetworkRate(sent_rate, received / (time.perf_counter() - began) / _GB, ahead_s)


def _send(connection: socket.socket) -> int:
    """Send for `_MEASURE_S`, and end this side; return the number of bytes."""
    data, count, until = bytes(_CHUNK), 0, time.monotonic() + _MEASURE_S
    while time.monotonic() < until:
        connection.sendall(data)
        count += len(data)
    connection.shutdown(socket.SHUT_WR)
    return count


def _take(connection: socket.socket) -> int:
    """Take bytes until the other side ends, for `_LONGEST_S` at most; return their number."""
    into, until = bytearray(_CHUNK), time.monotonic() + _LONGEST_S
    return sum(_receive(connection, into, until))


def _receive(connection: socket.socket, into: bytearray, until: float) -> Iterator[int]:
    while time.monotonic() < until and (count := connection.recv_into(into)):
        yield count


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
