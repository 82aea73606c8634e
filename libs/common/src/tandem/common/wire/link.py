"""The DEALER end of the wire: a process's connection to its coordinator."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.common import curve
from tandem.common.curve import Admitted
from tandem.common.errors import ConfigError, NotAdmitted, TandemError
from tandem.common.keys import KeyPair, ProcessKeys
from tandem.common.messages import (
    MAX_TEXT,
    Goodbye,
    Heartbeat,
    Hello,
    KeyAccepted,
    Refused,
    ServiceKind,
    Shutdown,
    Welcome,
)
from tandem.common.wire.frames import Codec, Frames, Incoming, Received, encode
from tandem.common.wire.hub import MOST_WAITING
from tandem.common.wire.pump import SHUTDOWN_GRACE_S, Pump

Answer = TypeVar("Answer", Welcome, KeyAccepted)

_MOST_BYTES_OF_ORDER = 1 << 30
_AT_ONCE_S = 1.0
_FAILURES, _FAILING_S = 5, 2.0
"""Failed handshakes, and their duration, after which to give up; an ending coordinator breaks off some as well."""


class _KeyRefused(TandemError):
    """The coordinator does not accept a key."""


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
        self._codec: Codec[Incoming] = Codec(incoming)
        self._keys, self._keys_of = keys, keys_of or "this process"
        self.own = curve.new_key_pair() if keys.is_joining else keys.own
        """Key pair of this process alone."""
        self.trainers = Admitted()
        """Keys of the run's trainers, as the coordinator last sent them."""
        self._context = zmq.Context()
        self._identity = identity
        self._dealer = self._new_dealer(identity, self.own)
        # One pipe each way between the process and the link's thread, since a socket may be used by one thread at a
        # time.
        self._incoming, self._arrived = self._pipe("arrived")
        self._queued, self._outgoing = self._pipe("queued")
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        for what in (self._incoming, self._woken):
            self._poller.register(what, zmq.POLLIN)
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._phase = "joining"

    def join(self, hello: Hello, timeout_s: float, is_waiting: Callable[[], None] | None = None) -> Welcome:
        """Say hello until the coordinator answers; call `is_waiting` if it does not answer at once.

        Raises `ConfigError` for an invalid address, `NotAdmitted` if the coordinator refuses for now or does not
        answer, `TandemError` if it refuses for good or belongs to another run.
        """
        deadline = time.monotonic() + timeout_s
        try:
            welcome = None
            while welcome is None:
                if self._keys.is_joining:
                    self._register(hello, deadline, timeout_s, is_waiting)
                    is_waiting = None
                try:
                    welcome = self._ask(self._dealer, hello, Welcome, deadline, timeout_s, is_waiting)
                except _KeyRefused:
                    if not self._keys.is_joining:
                        raise
                    # The coordinator that registered the key is gone, and another one continues the run.
                    self._disconnect()
        except BaseException:
            self._close_sockets()
            raise
        self._start(hello, welcome)
        return welcome

    def _register(self, hello: Hello, deadline: float, timeout_s: float, is_waiting: Callable[[], None] | None) -> None:
        """Register the key of this process with the coordinator."""
        with contextlib.closing(self._new_dealer(f"{self._identity}-joins", self._keys.own)) as dealer:
            said = msgspec.structs.replace(hello, registers=self.own.public)
            self._ask(dealer, said, KeyAccepted, deadline, timeout_s, is_waiting)

    def _disconnect(self) -> None:
        """Disconnect a socket after its key was refused, so that it can connect anew: libzmq does not retry by
        itself."""
        with contextlib.suppress(zmq.ZMQError):
            self._dealer.disconnect(self._coordinator)

    def _ask(
        self,
        dealer: zmq.Socket[bytes],
        hello: Hello,
        wanted: type[Answer],
        deadline: float,
        timeout_s: float,
        is_waiting: Callable[[], None] | None,
    ) -> Answer:
        """Connect, say hello and return the answer."""
        admission: Codec[Any] = Codec(wanted | Refused | Heartbeat | Shutdown)
        with contextlib.closing(_Handshake(dealer, self._coordinator, self._keys_of, encode(hello))) as handshake:
            try:
                dealer.connect(self._coordinator)
            except zmq.ZMQError as error:
                raise ConfigError(f"--coordinator {self._coordinator!r}: {error.strerror}") from error
            say_so_at = time.monotonic() + _AT_ONCE_S
            while (now := time.monotonic()) < deadline:
                if is_waiting is not None and now >= say_so_at:
                    is_waiting()
                    is_waiting = None
                until = deadline if is_waiting is None else min(deadline, say_so_at)
                if not handshake.poll(until - now):
                    continue
                match admission.decode(dealer.recv_multipart()).message:
                    case Refused(reason=reason) | Shutdown(reason=reason) as refusal:
                        is_for_good = isinstance(refusal, Refused) and refusal.is_for_good
                        raise (TandemError if is_for_good else NotAdmitted)(
                            f"the coordinator at {self._coordinator} refused this {self._service}: {reason}"
                        )
                    case Heartbeat():
                        continue
                    case answer:
                        assert isinstance(answer, wanted)
                        return answer
        raise NotAdmitted(
            f"{self._service} could not join: no answer from {self._coordinator} within {timeout_s:g} s; is a "
            "coordinator running there?"
        )

    def _new_dealer(self, identity: str, own: KeyPair) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt_string(zmq.IDENTITY, identity)
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, MOST_WAITING)
        dealer.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES_OF_ORDER)
        curve.prove(dealer, own, self._keys.coordinator)
        return dealer

    def set_phase(self, phase: str) -> None:
        """Set the process's phase, which the next heartbeat carries."""
        self._phase = phase

    def send(self, frames: Frames) -> None:
        """Queue frames for the coordinator."""
        with self._sending:
            self._outgoing.send_multipart(frames, copy=False)

    def receive(self, timeout_s: float) -> Received[Incoming] | None:
        """Return the next message other than heartbeats, or None after `timeout_s` or a `wake`."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._woken in ready:
            os.eventfd_read(self._woken)
        if self._incoming not in ready:
            return None
        frames = self._incoming.recv_multipart(copy=False)
        return self._codec.decode([frame.buffer for frame in frames])

    def wake(self) -> None:
        """Make `receive` return at once; may be called from any thread."""
        with self._sending:
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

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
            self._close_woken()
        self._context.term()

    def _pipe(self, name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return the ends of a pipe between two threads: the output, then the input."""
        ends = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in ends:
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
        ends[0].bind(f"inproc://{name}")
        ends[1].connect(f"inproc://{name}")
        return ends

    def _close_sockets(self) -> None:
        self._dealer.setsockopt(zmq.LINGER, 0)
        for socket in (self._dealer, self._incoming, self._arrived, self._queued, self._outgoing):
            socket.close()
        self._close_woken()
        self._context.term()

    def _close_woken(self) -> None:
        os.close(self._woken)
        self._woken = -1

    def _start(self, hello: Hello, welcome: Welcome) -> None:
        hello = msgspec.structs.replace(hello, index=welcome.index)
        pump = Pump(self._dealer, self._queued, self._arrived, hello, welcome, lambda: self._phase, self.trainers)
        self._thread = threading.Thread(target=pump.run, name="link", daemon=True)
        self._thread.start()


_watchers = itertools.count()


class _Handshake:
    """A watcher of a connecting socket, which says hello over each new connection.

    It gives up as soon as no answer can come. libzmq retries after any failure except a refused key. The coordinator
    that received a hello may be gone before it answers, and be replaced by another.
    """

    def __init__(self, dealer: zmq.Socket[bytes], address: str, keys_of: str, hello: Frames) -> None:
        self._hello = hello
        self._dealer = dealer
        self._address = address
        self._keys_of = keys_of
        self._failures: list[float] = []
        self._monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            # By default, the address has the socket's number, and the watcher before may still have that.
            f"inproc://handshake-{next(_watchers)}",
        )
        self._poller = zmq.Poller()
        for socket in (dealer, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message or a connection event; return whether there is a message.

        Raises `TandemError` once it is known that no message will come.
        """
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._monitor in ready:
            self._take(recv_monitor_message(self._monitor)["event"])
        return self._dealer in ready

    def close(self) -> None:
        """Stop watching."""
        self._dealer.disable_monitor()
        self._monitor.close()

    def _take(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures.clear()
            self._dealer.send_multipart(self._hello)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise _KeyRefused(f"the coordinator at {self._address} does not accept the key of {self._keys_of}")
        else:
            self._failures.append(time.monotonic())
            if len(self._failures) >= _FAILURES and self._failures[-1] - self._failures[0] > _FAILING_S:
                raise TandemError(
                    f"the process that listens at {self._address} does not prove the coordinator's key that "
                    f"{self._keys_of} has: it belongs to another run, or is something else"
                )
