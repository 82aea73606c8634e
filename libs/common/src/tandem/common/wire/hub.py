"""The ROUTER end of the wire: the coordinator's socket, and that of a rollout's samples."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import zmq

from tandem.common import curve
from tandem.common.curve import AdmittedKeys
from tandem.common.errors import ConfigError
from tandem.common.keys import KeyPair
from tandem.common.messages import Listener
from tandem.common.wire.frames import Frames, memory_of
from tandem.common.wire.gatekeeper import Gatekeeper
from tandem.common.wire.sockets import Waker, make_router

MOST_BYTES_OF_REPLY = 1 << 28
"""Most bytes in a frame to the coordinator; an engine's layouts take some dozens of megabytes at most."""


class HubPeer(NamedTuple):
    """The other end of a connection to a `Hub`."""

    identity: bytes
    """Identity of its socket, the same on all of its connections, and known to no other process."""
    key: str
    """The key that it has proven."""


class Hub:
    """A ROUTER socket: the coordinator's, or that of a rollout's samples.

    Used by one thread. Another may `send_if_idle`.
    """

    def __init__(
        self, address: str, key_pair: KeyPair, admitted: AdmittedKeys, *, max_bytes: int = MOST_BYTES_OF_REPLY
    ) -> None:
        """Bind the socket. Raises `ConfigError` if the address is taken or invalid.

        Args:
            address: address to listen on.
            key_pair: key pair that clients verify.
            admitted: keys of the clients to accept.
            max_bytes: size limit of a frame; a client that sends a larger one is disconnected.
        """
        self._context = zmq.Context()
        self._admitted = admitted
        self._socket = make_router(self._context, key_pair, max_bytes)
        self._waker: Waker | None = None
        self._awaited: zmq.Socket[bytes] | zmq.Poller = self._socket
        self._in_use = threading.RLock()
        """Held while a thread uses the socket, which is for one at a time."""
        self._gatekeeper = Gatekeeper(self._context, admitted, self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            reason = "the port is in use" if error.errno == zmq.EADDRINUSE else error.strerror
            raise ConfigError(f"cluster.address: cannot listen on {address!r}: {reason}") from error
        self.at = Listener(address=self._socket.getsockopt_string(zmq.LAST_ENDPOINT), public_key=key_pair.public)
        """Address and public key for clients."""

    @property
    def address(self) -> str:
        """The address that it listens on."""
        return self.at.address

    def send(self, peer: HubPeer, frames: Frames) -> bool:
        """Send to one peer; return False if its connection is gone."""
        with self._in_use:
            try:
                self._socket.send_multipart([peer.identity, *frames], copy=False)
            except zmq.ZMQError as error:
                if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    return False
                raise
        return True

    def send_if_idle(self, peers: Iterable[HubPeer], frames: Frames) -> None:
        """Send to peers, unless the hub's own thread uses the socket or has closed it. For any thread."""
        if not self._in_use.acquire(blocking=False):
            return
        try:
            for peer in peers if not self._socket.closed else ():
                self.send(peer, frames)
        finally:
            self._in_use.release()

    def receive(self, timeout_s: float) -> Iterator[tuple[HubPeer, Frames]]:
        """Wait up to `timeout_s` for a first message, then yield all that have arrived from admitted clients."""
        with self._in_use:
            if not self._awaited.poll(int(timeout_s * 1000)):
                return
        if self._waker is not None:
            self._waker.clear()
        with contextlib.suppress(zmq.Again):
            while True:
                with self._in_use:
                    identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                peer = HubPeer(identity.bytes, curve.derive_key(identity))
                if peer.key in self._admitted:  # it may have been removed since the client connected
                    yield peer, [*map(memory_of, frames)]

    def waker(self) -> Callable[[], None]:
        """Return what ends a wait of `receive`, from any thread."""
        if self._waker is None:
            self._waker = Waker()
            self._awaited = poller = zmq.Poller()
            for event_source in (self._socket, self._waker.fileno()):
                poller.register(event_source, zmq.POLLIN)
        return self._waker.wake

    def close(self) -> None:
        """Close the socket, giving sent messages a second to leave."""
        if self._waker is not None:
            self._waker.close()
        with self._in_use:
            self._socket.close()
        self._context.term()
        self._gatekeeper.join()
