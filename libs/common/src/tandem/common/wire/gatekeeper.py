"""The answer to libzmq whether a key may connect, and a limit on connections that have proven none.

libzmq asks it about each key (https://rfc.zeromq.org/spec/27). It answers on a thread of its own, so that no peer waits
for a busy process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tandem.common import descriptors
from tandem.common.curve import AdmittedKeys

_ZAP = "inproc://zeromq.zap.01"
_MOST_UNPROVEN = 256
"""Most unauthenticated connections from one address; twice as many from all addresses."""
_SHARE_UNPROVEN = 8
"""Divisor of the descriptor limit: gives the unauthenticated connections, if that is less."""
_SENT_TO_UNPROVEN = 256
"""Most bytes that libzmq sends before it accepts a key: greeting (64), WELCOME (170), or ERROR."""
_TCP_INFO_BYTES_SENT = 200
"""Offset of `tcpi_bytes_sent`, a 64-bit number, in Linux's ``tcp_info``."""


class Gatekeeper:
    """The ZAP handler of a context: tells libzmq which keys may connect, and limits unauthenticated connections.

    Its thread consumes libzmq's questions, and the connection events of the socket that it watches. It waits for
    nothing else, and ends when the context does.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        admitted: AdmittedKeys,
        listening: zmq.Socket[bytes] | None = None,
    ) -> None:
        """Start the thread; it limits the unauthenticated connections of the socket `listening`, which is not bound
        yet."""
        self._admitted = admitted
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._monitor = listening and listening.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._unproven = _Unproven()
        self._thread = threading.Thread(target=self._answer, name="gatekeeper", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end, once the context is terminated."""
        self._thread.join()

    def _answer(self) -> None:
        poller = zmq.Poller()
        for zmq_socket in (self._socket, self._monitor):
            if zmq_socket is not None:
                poller.register(zmq_socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._monitor is not None and self._monitor in ready:
                    happened = recv_monitor_message(self._monitor)
                    if happened["event"] == zmq.EVENT_ACCEPTED:
                        self._unproven.add(happened["value"])
                    elif happened["event"] == zmq.EVENT_DISCONNECTED:
                        self._unproven.remove(happened["value"])
                if self._socket in ready:
                    self._socket.send_multipart(self._verdict(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            for zmq_socket in (self._socket, self._monitor):
                if zmq_socket is not None:
                    zmq_socket.close()

    def _verdict(self, question: list[bytes]) -> list[bytes]:
        version, request, _domain, _address, _identity, mechanism, *credentials = question
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        if key.decode() in self._admitted:
            return [version, request, b"200", b"", key, b""]
        return [version, request, b"400", b"", b"", b""]


class _Unproven:
    """The unauthenticated connections of a listening socket; the oldest are closed when there are too many.

    libzmq reports the descriptor that it accepted, not when the peer proves a key. By then the descriptor may be
    closed and its number reused. So each connection is examined through a duplicate descriptor, and the kernel is
    asked how many bytes it was sent: an authenticated peer gets more than any other. libzmq sees a connection that
    is cut off as closed by the peer. A process of the run that is cut off loses nothing and reconnects.
    """

    def __init__(self) -> None:
        self._addresses: dict[int, str] = {}
        """Peer addresses by descriptor, the oldest first."""
        self._num: Counter[str] = Counter()

    def add(self, descriptor: int) -> None:
        """Add a connection, and cut off the oldest if there are too many from its address or in all."""
        self.remove(descriptor)
        with _looked_at(descriptor) as connection:
            address = _peer(connection)
        if address is None:
            return
        self._addresses[descriptor] = address
        self._num[address] += 1
        max_unproven = max(1, min(_MOST_UNPROVEN, descriptors.limit() // _SHARE_UNPROVEN))
        while self._num[address] > max_unproven:
            self._cut(next(each for each, peer_address in self._addresses.items() if peer_address == address))
        while len(self._addresses) > 2 * max_unproven:
            self._cut(next(iter(self._addresses)))

    def remove(self, descriptor: int) -> None:
        """Remove a closed connection."""
        address = self._addresses.pop(descriptor, None)
        if address is not None:
            self._num[address] -= 1
            if not self._num[address]:
                del self._num[address]

    def _cut(self, descriptor: int) -> None:
        """Close a connection unless it has proven a key by now; either way, stop counting it."""
        address = self._addresses[descriptor]
        self.remove(descriptor)
        with _looked_at(descriptor) as connection:
            if _peer(connection) == address and connection is not None and not _has_proven(connection):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _looked_at(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield the connection behind a descriptor; None if it is closed or no descriptor is free to duplicate it."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        yield None
        return
    with connection:
        yield connection


def _peer(connection: socket.socket | None) -> str | None:
    """Return the peer's address of a TCP connection."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return None


def _has_proven(connection: socket.socket) -> bool:
    """Tell by the bytes sent whether a key was accepted; True where the kernel does not report them."""
    try:
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES_SENT + 8)
    except OSError:
        return True
    if len(tcp_info) < _TCP_INFO_BYTES_SENT + 8:
        return True
    return bool(struct.unpack_from("=Q", tcp_info, _TCP_INFO_BYTES_SENT)[0] > _SENT_TO_UNPROVEN)
