"""The DEALER end of the wire: a process's connection to its coordinator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Generic

import msgspec
import zmq

from tandem.common import curve
from tandem.common.curve import AdmittedKeys
from tandem.common.keys import ProcessKeys
from tandem.common.messages import (
    MAX_TEXT,
    Goodbye,
    Hello,
    ServiceKind,
    Welcome,
)
from tandem.common.wire.admission import AdmissionRequests, KeyRefused
from tandem.common.wire.frames import Frames, Incoming, MessageCodec, ReceivedMessage, encode, memory_of
from tandem.common.wire.pump import SHUTDOWN_GRACE_S, FramePump
from tandem.common.wire.sockets import make_dealer_of_link, make_pipe
from tandem.common.wire.waker import Waker


class Link(Generic[Incoming]):
    """The connection of a process to its coordinator.

    Call `join` first; then `receive` from one thread, and `send` from any. The link's own thread exchanges
    heartbeats. It ends the whole process (exit code 70) if the coordinator is silent for longer than the heartbeat
    timeout, and no other has replaced it within the orphan timeout. A process without a coordinator has nothing to
    save, and its memory has no name that could outlive it.
    """

    def __init__(
        self, coordinator: str, service: ServiceKind, identity: str, incoming: Any, keys: ProcessKeys, keys_of: str = ""
    ) -> None:
        """Create a link that has not joined yet; `keys_of` names the source of the keys, for errors."""
        self._coordinator = coordinator
        self._service = service
        self._codec: MessageCodec[Incoming] = MessageCodec(incoming)
        self._keys, self._keys_of = keys, keys_of or "this process"
        self.own = curve.new_key_pair() if keys.is_joining else keys.own
        """Key pair of this process alone."""
        self.trainers = AdmittedKeys()
        """Keys of the run's trainers, as the coordinator last sent them."""
        self._context = zmq.Context()
        self._identity = identity
        self._dealer = make_dealer_of_link(self._context, identity, self.own, keys.coordinator)
        # One pipe each way between the process and the link's thread, since a socket may be used by one thread at a
        # time.
        self._incoming, self._arrived = make_pipe(self._context, "arrived")
        self._queued, self._outgoing = make_pipe(self._context, "queued")
        self._waker = Waker()
        self._woken = self._waker.fileno()
        """Descriptor that is ready after a `wake`."""
        self._poller = zmq.Poller()
        for event_source in (self._incoming, self._woken):
            self._poller.register(event_source, zmq.POLLIN)
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def join(self, hello: Hello, timeout_s: float, is_waiting: Callable[[], None] | None = None) -> Welcome:
        """Say hello until the coordinator answers; call `is_waiting` if it does not answer at once.

        Raises `ConfigError` for an invalid address, `NotAdmitted` if the coordinator refuses for now or does not
        answer, `TandemError` if it refuses for good or belongs to another run.
        """
        admission = AdmissionRequests(self._coordinator, self._service, self._keys_of, timeout_s, is_waiting)
        try:
            welcome = None
            while welcome is None:
                if self._keys.is_joining:
                    keys, identity = self._keys, f"{self._identity}-joins"
                    socket = make_dealer_of_link(self._context, identity, keys.own, keys.coordinator)
                    with contextlib.closing(socket) as dealer:
                        admission.register(dealer, hello, self.own.public)
                try:
                    welcome = admission.ask(self._dealer, hello, Welcome)
                except KeyRefused:
                    if not self._keys.is_joining:
                        raise
                    # The coordinator that registered the key is gone, and another one continues the run.
                    self._disconnect()
        except BaseException:
            self._close_sockets()
            raise
        self._start(hello, welcome)
        return welcome

    def _disconnect(self) -> None:
        """Disconnect a socket after its key was refused, so that it can connect anew: libzmq does not retry by
        itself."""
        with contextlib.suppress(zmq.ZMQError):
            self._dealer.disconnect(self._coordinator)

    def set_phase(self, phase: str) -> None:
        """Set the phase of a process that has joined; the next heartbeat carries it."""
        self._pump.phase = phase

    def send(self, frames: Frames) -> None:
        """Queue frames for the coordinator."""
        with self._sending:
            self._outgoing.send_multipart(frames, copy=False)

    def receive(self, timeout_s: float) -> ReceivedMessage[Incoming] | None:
        """Return the next message other than heartbeats, or None after `timeout_s` or a `wake`."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._woken in ready:
            self._waker.clear()
        if self._incoming not in ready:
            return None
        frames = self._incoming.recv_multipart(copy=False)
        return self._codec.decode([*map(memory_of, frames)])

    def wake(self) -> None:
        """Make `receive` return at once; may be called from any thread."""
        self._waker.wake()

    def close(self, reason: str) -> None:
        """Say goodbye and stop the thread."""
        if self._thread is None:
            return
        self.send(encode(Goodbye(reason=reason[:MAX_TEXT])))
        self.send([b""])  # tells our own thread to end
        self._thread.join(timeout=SHUTDOWN_GRACE_S)
        self._thread = None
        self._incoming.close()
        with self._sending:
            self._outgoing.close()
        self._waker.close()
        self._context.term()

    def _close_sockets(self) -> None:
        self._dealer.setsockopt(zmq.LINGER, 0)
        for socket in (self._dealer, self._incoming, self._arrived, self._queued, self._outgoing):
            socket.close()
        self._waker.close()
        self._context.term()

    def _start(self, hello: Hello, welcome: Welcome) -> None:
        hello = msgspec.structs.replace(hello, index=welcome.index)
        self._pump = FramePump(self._dealer, self._queued, self._arrived, hello, welcome, self.trainers)
        self._thread = threading.Thread(target=self._pump.run, name="link", daemon=True)
        self._thread.start()
