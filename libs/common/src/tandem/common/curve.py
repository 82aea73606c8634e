"""CURVE on ZeroMQ's sockets: who may connect is known by a key, and what is sent is encrypted.

Whoever binds proves a key that those who connect know beforehand; whoever connects proves one of those that are
admitted. Both come before either reads a byte of the other's messages. libzmq asks a `Gatekeeper` about each key
(https://rfc.zeromq.org/spec/27), which a thread of its own answers, so that nobody waits for a busy process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import zmq
from zmq.utils import z85

from tandem.common.errors import TandemError
from tandem.common.keys import KeyPair

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = "tandem"
_HANDSHAKE_MS = 10_000
"""How long a connection may last that proves nothing."""


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
    """Answers libzmq, for all sockets of a context, whether the owner of a key may connect.

    Its thread consumes one question after another, and ends when the context does.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: Admitted) -> None:
        self._admitted = admitted
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._thread = threading.Thread(target=self._answer, name="gatekeeper", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, after the context's."""
        self._thread.join()

    def _answer(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._verdict(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            self._socket.close()

    def _verdict(self, question: list[bytes]) -> list[bytes]:
        version, request, _domain, _address, _identity, mechanism, *credentials = question
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        if key.decode() in self._admitted:
            return [version, request, b"200", b"", key, b""]
        return [version, request, b"400", b"", b"", b""]


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
