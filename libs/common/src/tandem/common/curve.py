"""CURVE on ZeroMQ's sockets: peers authenticate with keys, and traffic is encrypted.

The binding side proves a key that its peers know in advance. The connecting side proves a key that must be admitted.
Both happen before either side reads a message. libzmq asks a `tandem.common.wire.gatekeeper.Gatekeeper` about each key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import zmq

from tandem.common.errors import TandemError
from tandem.common.keys import KeyPair

_DOMAIN = "tandem"
_HANDSHAKE_MS = 5000
"""How long a connection may take to prove a key."""


def new_key_pair() -> KeyPair:
    """Return a new key pair. Raises `TandemError` if libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise TandemError(
            f"libzmq {zmq.zmq_version()} was built without CURVE, with which the processes of a run authenticate: "
            "install pyzmq from its wheel"
        )
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


class AdmittedKeys:
    """The public keys admitted by a socket. Any thread may change them; each change is atomic.

    A removed key is refused at once, on existing connections too.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = frozenset(keys)
        self._changing = threading.Lock()

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def keys(self) -> tuple[str, ...]:
        """Return the keys in a stable order."""
        return tuple(sorted(self._keys))

    def replace(self, keys: Iterable[str]) -> None:
        """Admit these keys and no others."""
        with self._changing:
            self._keys = frozenset(keys)

    def add(self, key: str) -> None:
        """Admit one more key."""
        with self._changing:
            self._keys |= {key}

    def remove(self, key: str) -> None:
        """Remove a key if it was admitted."""
        with self._changing:
            self._keys -= {key}


def hear_processes(socket: zmq.Socket[bytes], key_pair: KeyPair) -> None:
    """Make a socket, before it binds, prove `key_pair` and admit only the keys of its context's gatekeeper."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, key_pair.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gatekeeper, refuse every connection
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def prove(socket: zmq.Socket[bytes], key_pair: KeyPair, server: str) -> None:
    """Make a socket, before it connects, prove `key_pair` and accept only a server that proves the key `server`."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, key_pair.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, key_pair.secret)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def derive_key(frame: zmq.Frame) -> str:
    """Return the key that the sender of a frame has proven."""
    return str(frame.get("User-Id"))
