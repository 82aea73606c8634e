"""Connections from one process to several that answer what they are asked."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.common import curve
from tandem.common.errors import WireError
from tandem.common.keys import KeyPair
from tandem.common.messages import Listener
from tandem.common.wire.frames import Frames

_AGAIN_S = 0.2


class Callers:
    """DEALER connections to several processes that answer what they are asked. Used by one thread.

    A connection that breaks is made again by itself, but what was on its way is lost: `receive` says whenever there is
    a new one, and then is the time to ask, again.
    """

    def __init__(self, listeners: Mapping[str, Listener], own: KeyPair, *, max_bytes: int) -> None:
        """Begin to connect to these, given by name. Raises `WireError` for an address or a key that is none.

        `own` is proven to all of them. Who sends a frame of more than `max_bytes` loses the connection.
        """
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._listeners = dict(listeners)
        self._refused: dict[str, float] = {}
        """Those that did not accept the key, and when to try again: they may not have heard of it yet."""
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._down_since = dict.fromkeys(listeners, time.monotonic())
        for name, listener in listeners.items():
            socket = self._sockets[name] = self._context.socket(zmq.DEALER)
            self._names[socket] = name
            socket.setsockopt(zmq.LINGER, 0)
            # zmq's own heartbeats, which its threads answer whatever the process does: for hosts that vanish.
            socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
            monitor = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
            )
            self._monitors[monitor] = name
            for each in (socket, monitor):
                self._poller.register(each, zmq.POLLIN)
            try:
                curve.prove(socket, own, listener.public_key)
                socket.connect(listener.address)
            except zmq.ZMQError as error:
                self.close()
                raise WireError(f"{name} cannot be reached at {listener.address!r}: {error.strerror}") from error

    def send(self, name: str, frames: Frames) -> None:
        """Send to one of them."""
        self._sockets[name].send_multipart(frames, copy=False)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, Frames | None]]:
        """Wait up to `timeout_s` for something to happen; yield by name what came, None for a new connection."""
        for socket, _ in self._poller.poll(int(timeout_s * 1000)):
            if socket not in self._monitors:
                yield self._names[socket], [frame.buffer for frame in socket.recv_multipart(copy=False)]
                continue
            name, event = self._monitors[socket], recv_monitor_message(socket)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused[name] = time.monotonic() + _AGAIN_S
                continue
            is_up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if is_up or self._down_since[name] == math.inf:
                self._down_since[name] = math.inf if is_up else time.monotonic()
            if is_up:
                yield name, None
        self._try_again()

    def _try_again(self) -> None:
        """Connect once more to those that did not accept the key: libzmq does not do so by itself."""
        now = time.monotonic()
        for name in [name for name, at in self._refused.items() if now >= at]:
            del self._refused[name]
            address = self._listeners[name].address
            with contextlib.suppress(zmq.ZMQError):
                self._sockets[name].disconnect(address)  # or to connect there again would do nothing
            self._sockets[name].connect(address)

    def down_for(self, name: str) -> float:
        """Return the seconds for which there has been no connection; zero while there is one."""
        return max(0.0, time.monotonic() - self._down_since[name])

    def close(self) -> None:
        """Close all connections, at once."""
        for socket in self._sockets.values():
            socket.disable_monitor()
        for each in (*self._sockets.values(), *self._monitors):
            each.close(linger=0)
        self._context.term()
