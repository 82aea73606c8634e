"""CURVE on ZeroMQ's sockets: who may connect is known by a key, and what is sent is encrypted.

Whoever binds proves a key that those who connect know beforehand; whoever connects proves one of those that are
admitted. Both come before either reads a byte of the other's messages. libzmq asks a `Gatekeeper` about each key
(https://rfc.zeromq.org/spec/27), which a thread of its own answers, so that nobody waits for a busy process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tandem.common import descriptors
from tandem.common.errors import TandemError
from tandem.common.keys import KeyPair

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = "tandem"
_HANDSHAKE_MS = 5000
"""How long a connection may last that proves nothing."""
_MOST_UNPROVEN = 256
"""Connections of one address that have proven nothing yet; twice as many of all addresses."""
_SHARE_UNPROVEN = 8
"""One in so many of the process's descriptors, where that is less: the others are for its files and its members."""
_SENT_TO_UNPROVEN = 256
"""Bytes that libzmq sends before a key is accepted, at most: greeting (64), WELCOME (170), or ERROR."""
_TCP_INFO_BYTES_SENT = 200
"""Where Linux's ``tcp_info`` has `tcpi_bytes_sent`, a number of 64 bits."""


def new_key_pair() -> KeyPair:
    """Return a key pair that nobody has. Raises `TandemError` where libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise TandemError(
            f"libzmq {zmq.zmq_version()} was built without CURVE, by which the members of a run prove that they are: "
            "install pyzmq from its wheel"
        )
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


class Admitted:
    """The public keys that a socket hears. Any thread may change them; those of others see all of a change or nothing.

    A key that is taken out is not heard from then on, over connections that are there either.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = frozenset(keys)
        self._changing = threading.Lock()

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def keys(self) -> tuple[str, ...]:
        """Return them, in an order that depends on nothing else."""
        return tuple(sorted(self._keys))

    def replace(self, keys: Iterable[str]) -> None:
        """Admit these and no others."""
        with self._changing:
            self._keys = frozenset(keys)

    def add(self, key: str) -> None:
        """Admit one more."""
        with self._changing:
            self._keys |= {key}

    def remove(self, key: str) -> None:
        """Shut one out, if it was admitted."""
        with self._changing:
            self._keys -= {key}


class Gatekeeper:
    """Answers libzmq, for all sockets of a context, whether the owner of a key may connect; bounds who only connects.

    Its thread consumes one question after another, and what happens to the connections of the sockets that it watches;
    it waits for nothing else, and ends when the context does.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        admitted: Admitted,
        listening: zmq.Socket[bytes] | None = None,
    ) -> None:
        """Begin; `listening` is the socket, not yet bound, whose unproven connections are bounded."""
        self._admitted = admitted
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._monitor = listening and listening.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._unproven = _Unproven()
        self._thread = threading.Thread(target=self._answer, name="gatekeeper", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, after the context's."""
        self._thread.join()

    def _answer(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, self._monitor):
            if each is not None:
                poller.register(each, zmq.POLLIN)
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
            for each in (self._socket, self._monitor):
                if each is not None:
                    each.close()

    def _verdict(self, question: list[bytes]) -> list[bytes]:
        version, request, _domain, _address, _identity, mechanism, *credentials = question
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        if key.decode() in self._admitted:
            return [version, request, b"200", b"", key, b""]
        return [version, request, b"400", b"", b"", b""]


class _Unproven:
    """The connections of a socket that listens which have proven nothing; the oldest go when there are too many.

    libzmq says which descriptor it has accepted, not when its other end has proven a key. By then it may have closed it
    and accepted another by the same number, so each is looked at by a descriptor of its own, and asked of the kernel
    how much it was sent: a member gets more than whoever proves nothing. libzmq notices the end of a connection as if
    the other side had closed it. A process of the run that is cut off so has lost nothing, and connects again.
    """

    def __init__(self) -> None:
        self._addresses: dict[int, str] = {}
        """By descriptor, the oldest first."""
        self._num: Counter[str] = Counter()

    def add(self, descriptor: int) -> None:
        """Note a connection, and cut off the oldest if there are too many, from its address or from all."""
        self.remove(descriptor)
        with _looked_at(descriptor) as connection:
            address = _peer(connection)
        if address is None:
            return
        self._addresses[descriptor] = address
        self._num[address] += 1
        most = max(1, min(_MOST_UNPROVEN, descriptors.limit() // _SHARE_UNPROVEN))
        while self._num[address] > most:
            self._cut(next(each for each, its in self._addresses.items() if its == address))
        while len(self._addresses) > 2 * most:
            self._cut(next(iter(self._addresses)))

    def remove(self, descriptor: int) -> None:
        """Forget a connection that is closed."""
        address = self._addresses.pop(descriptor, None)
        if address is not None:
            self._num[address] -= 1
            if not self._num[address]:
                del self._num[address]

    def _cut(self, descriptor: int) -> None:
        """End a connection, unless it has proven a key meanwhile; it counts no longer."""
        address = self._addresses[descriptor]
        self.remove(descriptor)
        with _looked_at(descriptor) as connection:
            if _peer(connection) == address and connection is not None and not _has_proven(connection):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _looked_at(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield the connection that a descriptor is of now; None if it is of none, or there is no descriptor left."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        yield None
        return
    with connection:
        yield connection


def _peer(connection: socket.socket | None) -> str | None:
    """Return the address at the other end of a connection over TCP."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return None


def _has_proven(connection: socket.socket) -> bool:
    """Tell by what was sent whether a key was accepted; where the kernel does not say, it counts as proven."""
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES_SENT + 8)
    except OSError:
        return True
    if len(told) < _TCP_INFO_BYTES_SENT + 8:
        return True
    return bool(struct.unpack_from("=Q", told, _TCP_INFO_BYTES_SENT)[0] > _SENT_TO_UNPROVEN)


def hear_members(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    """Have a socket, before it binds, prove `own` and hear nobody whom the gatekeeper of its context does not admit."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # where there is no gatekeeper, nobody may in
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def prove(socket: zmq.Socket[bytes], own: KeyPair, server: str) -> None:
    """Have a socket, before it connects, prove `own`, and speak to nobody who does not prove the key `server`."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def key_of(frame: zmq.Frame) -> str:
    """Return the key that whoever sent a frame has proven."""
    return str(frame.get("User-Id"))
