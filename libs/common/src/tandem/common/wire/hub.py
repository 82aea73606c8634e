"""The ROUTER end of the wire: the coordinator's, and that of a rollout's samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import zmq

from tandem.common import curve
from tandem.common.curve import Admitted
from tandem.common.errors import ConfigError
from tandem.common.keys import KeyPair
from tandem.common.messages import Listener
from tandem.common.wire.frames import Frames

MOST_BYTES_OF_REPLY = 1 << 28
"""Of a frame on its way to a coordinator: the layouts of an engine are some dozens of megabytes at most."""
MOST_WAITING = 1000
"""Messages of a connection."""


class Peer(NamedTuple):
    """Whoever is at the other end of a connection to a `Hub`."""

    identity: bytes
    """Of its socket, which keeps it over all its connections, and tells it to nobody else."""
    key: str
    """Which it has proven."""


class Hub:
    """A ROUTER socket: the coordinator's, or that of a rollout's samples. Used by one thread."""

    def __init__(self, address: str, own: KeyPair, admitted: Admitted, *, max_bytes: int = MOST_BYTES_OF_REPLY) -> None:
        """Bind. Raises `ConfigError` if the address is taken or is none.

        Args:
            address: where to listen.
            own: what it proves to whoever connects.
            admitted: whom it hears.
            max_bytes: whoever sends a frame of more loses its connection.

        """
        self._context = zmq.Context()
        self._admitted = admitted
        self._socket = self._context.socket(zmq.ROUTER)
        self._gatekeeper = curve.Gatekeeper(self._context, admitted, self._socket)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Who connects again has the same identity, and may do so while the connection before seems to be there: where
        # something between has reset one end alone. Nobody else can take it over, since nobody else knows it.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDTIMEO, 5000)
        # What is sent is never dropped, nor does the loop wait for a slow receiver. Of what arrives, a connection may
        # have so much waiting here; the rest waits in its own sender.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        curve.hear_members(self._socket, own)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            why = "the port is in use" if error.errno == zmq.EADDRINUSE else error.strerror
            raise ConfigError(f"cluster.address: cannot listen on {address!r}: {why}") from error
        self.at = Listener(address=self._socket.getsockopt_string(zmq.LAST_ENDPOINT), public_key=own.public)
        """What those who connect are to know."""

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.at.address

    def send(self, peer: Peer, frames: Frames) -> bool:
        """Send to one peer; False if its connection is gone."""
        try:
            self._socket.send_multipart([peer.identity, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def receive(self, timeout_s: float) -> Iterator[tuple[Peer, Frames]]:
        """Wait up to `timeout_s` for a first message, then yield all that have arrived from those who are admitted."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return
        with contextlib.suppress(zmq.Again):
            while True:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                peer = Peer(identity.bytes, curve.key_of(identity))
                if peer.key in self._admitted:  # or it was shut out since it has connected
                    yield peer, [frame.buffer for frame in frames]

    def close(self) -> None:
        """Close the socket, giving what was sent a second to leave."""
        self._socket.close()
        self._context.term()
        self._gatekeeper.join()
