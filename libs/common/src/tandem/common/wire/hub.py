"""The ends of the wire with several peers.

A ROUTER socket is the coordinator's, or in a thread that answers, such as that of a rollout's samples. DEALER sockets
are those of a process that asks several others.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.common import curve
from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.errors import ConfigError, WireError
from tandem.common.keys import KeyPair
from tandem.common.messages import Listener
from tandem.common.wire.frames import Frames, MessageCodec, memory_of
from tandem.common.wire.gatekeeper import Gatekeeper
from tandem.common.wire.sockets import Waker, make_dealer_of_caller, make_router

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


_AGAIN_S = 0.2
_POLL_S = 0.2


class AnsweringThread:
    """A ROUTER socket and its thread. It waits only for the next request, for short intervals."""

    def __init__(
        self,
        host: str,
        admitted: AdmittedKeys,
        requests: Any,
        answer: Callable[[Any], Frames | None],
        *,
        name: str,
        max_bytes: int,
    ) -> None:
        """Listen on a port of `host`, and answer until it is closed.

        Args:
            host: host or address to listen on.
            admitted: keys of the clients to accept.
            requests: the message, or the union of messages, that they send. What is none has no answer: a real process
                has a deadline, and asks again.
            answer: returns the answer to a request, or None where it has none. It is called in the thread.
            name: name of the thread.
            max_bytes: size limit of a request.
        """
        self._codec: MessageCodec[Any] = MessageCodec(requests)
        self._answer = answer
        self._hub = Hub(f"tcp://{host}:*", new_key_pair(), admitted, max_bytes=max_bytes)
        self.at = self._hub.at
        """Its listener."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more, and close the socket."""
        self._is_closed.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            for peer, frames in self._hub.receive(_POLL_S):
                try:
                    request = self._codec.decode(frames).message
                except WireError:
                    continue
                if (reply := self._answer(request)) is not None:
                    self._hub.send(peer, reply)
        self._hub.close()


class CallerConnections:
    """DEALER connections to several processes that answer requests. Used by one thread.

    A broken connection is restored automatically, but messages in flight are lost. `receive` reports each new
    connection, upon which the caller sends its request again.
    """

    def __init__(self, listeners: Mapping[str, Listener], key_pair: KeyPair, *, max_bytes: int) -> None:
        """Start to connect to listeners, given by name. Raises `WireError` for an invalid address or key.

        `key_pair` authenticates this process to all of them. A peer that sends a frame of more than `max_bytes` is
        disconnected.
        """
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._listeners = dict(listeners)
        self._refused: dict[str, float] = {}
        """Listeners that refused the key, with the time of the next try: they may not have heard of the key yet."""
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._down_since = dict.fromkeys(listeners, time.monotonic())
        for name, listener in listeners.items():
            socket = self._sockets[name] = make_dealer_of_caller(self._context, max_bytes)
            self._names[socket] = name
            monitor = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
            )
            self._monitors[monitor] = name
            for zmq_socket in (socket, monitor):
                self._poller.register(zmq_socket, zmq.POLLIN)
            try:
                curve.prove(socket, key_pair, listener.public_key)
                socket.connect(listener.address)
            except zmq.ZMQError as error:
                self.close()
                raise WireError(f"{name} cannot be reached at {listener.address!r}: {error.strerror}") from error

    def send(self, name: str, frames: Frames) -> None:
        """Send frames to one of the processes."""
        self._sockets[name].send_multipart(frames, copy=False)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, Frames | None]]:
        """Wait up to `timeout_s` for an event; yield what each process sent, or None for a new connection."""
        for socket, _ in self._poller.poll(int(timeout_s * 1000)):
            if socket not in self._monitors:
                yield self._names[socket], [*map(memory_of, socket.recv_multipart(copy=False))]
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
        if self._refused:
            self._try_again()

    def _try_again(self) -> None:
        """Reconnect to listeners that refused the key: libzmq does not do so by itself."""
        now = time.monotonic()
        for name in [name for name, at in self._refused.items() if now >= at]:
            del self._refused[name]
            address = self._listeners[name].address
            with contextlib.suppress(zmq.ZMQError):
                self._sockets[name].disconnect(address)  # otherwise connecting there again would do nothing
            self._sockets[name].connect(address)

    def down_for(self, name: str) -> float:
        """Return the seconds without a connection; zero while there is one."""
        return max(0.0, time.monotonic() - self._down_since[name])

    def close(self) -> None:
        """Close all connections at once."""
        for socket in self._sockets.values():
            socket.disable_monitor()
        for zmq_socket in (*self._sockets.values(), *self._monitors):
            zmq_socket.close(linger=0)
        self._context.term()
