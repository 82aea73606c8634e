"""The DEALER end of the wire: a process's connection to its coordinator, and the thread behind it."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.common import curve, messages
from tandem.common.curve import AdmittedKeys
from tandem.common.errors import ConfigError, NotAdmitted, TandemError
from tandem.common.keys import ProcessKeys
from tandem.common.messages import Heartbeat, Hello, KeyAccepted, Refused, ServiceKind, Shutdown, Welcome
from tandem.common.wire.frames import (
    UNDECODABLE,
    Frames,
    Incoming,
    MessageCodec,
    ReceivedMessage,
    encode,
    memory_of,
    tag_decoder,
)
from tandem.common.wire.sockets import Waker, make_dealer_of_link, make_pipe

_EXIT_COORDINATOR_LOST = 70
EXIT_NOT_ADMITTED, EXIT_AWAITED_ANEW = 75, 76
"""Exit codes of a process that was rejected, and may retry, and of one that was told to end because another process
continues the run in its place."""
SHUTDOWN_GRACE_S = 5.0
"""Seconds that a process has to end by itself after `Shutdown` before its link ends it."""

_trainer_keys_decoder = msgspec.msgpack.Decoder(messages.TrainerKeys)
_shutdown_decoder = msgspec.msgpack.Decoder(messages.Shutdown)
_welcome_decoder = msgspec.msgpack.Decoder(messages.Welcome)
_refused_decoder = msgspec.msgpack.Decoder(messages.Refused)


def exit_code(shutdown: messages.Shutdown) -> int:
    """Return the exit code of a process that was told to end."""
    return EXIT_AWAITED_ANEW if shutdown.is_awaited_anew else 0


class ThreadStalls:
    """The time for which a listening thread was kept from listening.

    Its process, or the whole machine, was stopped, or its disk did not respond.
    """

    def __init__(self) -> None:
        self._listened_at = time.monotonic()

    def until(self, now: float, usual_s: float) -> float:
        """Return the seconds since the last call in excess of `usual_s`, to be subtracted from every measured
        silence."""
        stall_s = max(0.0, now - self._listened_at - usual_s)
        self._listened_at = now
        return stall_s


class FramePump:
    """The loop of a link's thread: moves frames between process and socket, sends heartbeats, watches the
    coordinator."""

    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        queued: zmq.Socket[bytes],
        arrived: zmq.Socket[bytes],
        hello: messages.Hello,
        welcome: messages.Welcome,
        trainers: AdmittedKeys,
    ) -> None:
        """Prepare the loop; `hello` is said to any other coordinator of the run."""
        self._trainers = trainers
        self._trainer_keys = 0
        """Number of the newest `TrainerKeys` received."""
        self._dealer = dealer
        self._queued = queued
        self._arrived = arrived
        self._hello = hello
        self._welcome = welcome
        self.phase = "joining"
        """Activity of the process, for heartbeats and errors."""
        self._last_seen = self._last_beat = time.monotonic()
        self._is_waiting = False
        """Whether it waits for another coordinator."""
        self._end_by = math.inf
        self._end_code = 0
        self._monitor: zmq.Socket[bytes] | None = None
        if welcome.orphan_timeout_s:
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self._monitor = dealer.get_monitor_socket(events, "inproc://connections")

    def run(self) -> None:
        """Consume both sides until the process closes the link; never wait longer than a heartbeat interval."""
        poller = zmq.Poller()
        for socket in (self._dealer, self._queued, self._monitor):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        interval = self._welcome.heartbeat_interval_s
        stalls = ThreadStalls()
        while True:
            ready = dict(poller.poll(int(interval * 1000 / 2)))
            now = time.monotonic()
            self._last_seen += stalls.until(now, interval)
            if self._dealer in ready:
                self._last_seen, self._is_waiting = now, False
                self._forward_incoming(now)
            if self._monitor is not None and self._monitor in ready:
                self._take_connection(recv_monitor_message(self._monitor)["event"], now)
            if self._queued in ready:
                frames = self._queued.recv_multipart(copy=False)
                if len(frames) == 1 and len(frames[0]) == 0:
                    break
                self._send(frames)
            if now - self._last_beat >= interval:
                self._last_beat = now
                self._send(
                    encode(messages.Heartbeat(phase=self.phase[: messages.MAX_TEXT], trainer_keys=self._trainer_keys))
                )
            self._watch(now)
        if self._monitor is not None:
            self._dealer.disable_monitor()
            self._monitor.close()
        self._dealer.close()
        self._queued.close()
        self._arrived.close()

    def _send(self, frames: Sequence[Any]) -> None:
        """Send, or queue for the next connection; drop the frames if there will be none because the key was refused."""
        with contextlib.suppress(zmq.Again):
            self._dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _watch(self, now: float) -> None:
        """End the process if it has no coordinator any more, or does not end when told to."""
        silent_s, patience_s = now - self._last_seen, self._welcome.heartbeat_timeout_s
        if silent_s > patience_s + self._welcome.orphan_timeout_s:
            reason = f"the coordinator was silent for {silent_s:.0f} s while {self.phase}"
            self._end_process(reason, _EXIT_COORDINATOR_LOST)
        if silent_s > patience_s and not self._is_waiting:
            self._is_waiting = True
            self._say(
                f"the coordinator is silent for {silent_s:.0f} s; waiting for another one, up to "
                f"{self._welcome.orphan_timeout_s:g} s"
            )
        if now > self._end_by:
            reason = f"still {self.phase} {SHUTDOWN_GRACE_S:g} s after the coordinator's shutdown"
            self._end_process(reason, self._end_code)

    def _forward_incoming(self, now: float) -> None:
        """Pass one message on to the process, unless it is about the connection alone."""
        frames = self._dealer.recv_multipart(copy=False)
        header = frames[0].buffer
        try:
            match tag_decoder.decode(header).type:
                case "Heartbeat":
                    return
                case "TrainerKeys":
                    trainer_keys = _trainer_keys_decoder.decode(header)
                    self._trainers.replace(trainer_keys.public_keys)
                    self._trainer_keys = trainer_keys.number
                    return
                case "Welcome":
                    self._take_welcome(_welcome_decoder.decode(header), now)
                    return
                case "Refused":
                    refused = _refused_decoder.decode(header)
                    self._leave(f"another coordinator goes on with the run: {refused.reason}", now)
                    return
                case "Shutdown":
                    self._end_code = exit_code(_shutdown_decoder.decode(header))
                    self._end_by = now + SHUTDOWN_GRACE_S
                case _:
                    pass
        except UNDECODABLE:
            pass  # malformed: `receive` reports it to the process
        self._arrived.send_multipart(frames, copy=False)

    def _take_connection(self, event: int, now: float) -> None:
        """Say hello over a new connection: it may be to another coordinator."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._send(encode(self._hello))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # libzmq does not retry by itself
            self._leave("another coordinator goes on with the run, and does not accept the key of this process", now)

    def _take_welcome(self, welcome: messages.Welcome, now: float) -> None:
        """Rejoin the run under another coordinator, by the same name."""
        if (welcome.run_id, welcome.name) != (self._welcome.run_id, self._welcome.name):
            self._leave(f"another coordinator takes this process for {welcome.name} of run {welcome.run_id}", now)
            return
        self._trainer_keys = 0  # a new coordinator counts from the beginning
        self._trainers.replace(())
        self._say("taken up by another coordinator")

    def _leave(self, reason: str, now: float) -> None:
        """Have the process end as if it had been told to."""
        if self._end_by == math.inf:
            shutdown = messages.Shutdown(reason=reason[: messages.MAX_TEXT], is_awaited_anew=True)
            self._end_by, self._end_code = now + SHUTDOWN_GRACE_S, exit_code(shutdown)
            self._arrived.send_multipart(encode(shutdown))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{self._welcome.name}: {text}", file=sys.stderr, flush=True)

    def _end_process(self, reason: str, code: int) -> None:
        self._say(f"ending: {reason}")
        os._exit(code)


class Link(Generic[Incoming]):
    """The connection of a process to its coordinator.

    Call `join` first; then `receive` from one thread, and `send` from any. The link's own thread exchanges
    heartbeats. It ends the whole process (exit code 70) if the coordinator is silent for longer than the heartbeat
    timeout, and no other has replaced it within the orphan timeout. A process without a coordinator has nothing to
    save, and its memory has no name that could outlive it.
    """

    def __init__(
        self,
        coordinator: str,
        service: messages.ServiceKind,
        identity: str,
        incoming: Any,
        keys: ProcessKeys,
        keys_of: str = "",
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

    def join(
        self, hello: messages.Hello, timeout_s: float, is_waiting: Callable[[], None] | None = None
    ) -> messages.Welcome:
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
                    welcome = admission.ask(self._dealer, hello, messages.Welcome)
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
        self.send(encode(messages.Goodbye(reason=reason[: messages.MAX_TEXT])))
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

    def _start(self, hello: messages.Hello, welcome: messages.Welcome) -> None:
        hello = msgspec.structs.replace(hello, index=welcome.index)
        self._pump = FramePump(self._dealer, self._queued, self._arrived, hello, welcome, self.trainers)
        self._thread = threading.Thread(target=self._pump.run, name="link", daemon=True)
        self._thread.start()


Answer = TypeVar("Answer", Welcome, KeyAccepted)

_AT_ONCE_S = 1.0
_FAILURES, _FAILING_S = 5, 2.0
"""Failed handshakes, and their duration, after which to give up; an ending coordinator breaks off some as well."""


class KeyRefused(TandemError):
    """The coordinator does not accept a key."""


class AdmissionRequests:
    """The requests of one process to its coordinator, all before one deadline."""

    def __init__(
        self,
        coordinator: str,
        service: ServiceKind,
        keys_of: str,
        timeout_s: float,
        is_waiting: Callable[[], None] | None,
    ) -> None:
        """Begin to count the time; `is_waiting` is called if the first request is not answered at once."""
        self._coordinator, self._service, self._keys_of = coordinator, service, keys_of
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._is_waiting = is_waiting

    def register(self, dealer: zmq.Socket[bytes], hello: Hello, public_key: str) -> None:
        """Register a key with the coordinator, at a socket that proves the one for joining."""
        self.ask(dealer, msgspec.structs.replace(hello, registers=public_key), KeyAccepted)

    def ask(self, dealer: zmq.Socket[bytes], hello: Hello, answer_type: type[Answer]) -> Answer:
        """Connect, say hello and return the answer."""
        is_waiting, self._is_waiting = self._is_waiting, None
        admission: MessageCodec[Any] = MessageCodec(answer_type | Refused | Heartbeat | Shutdown)
        with contextlib.closing(_Handshake(dealer, self._coordinator, self._keys_of, encode(hello))) as handshake:
            try:
                dealer.connect(self._coordinator)
            except zmq.ZMQError as error:
                raise ConfigError(f"--coordinator {self._coordinator!r}: {error.strerror}") from error
            say_so_at = time.monotonic() + _AT_ONCE_S
            while (now := time.monotonic()) < self._deadline:
                if is_waiting is not None and now >= say_so_at:
                    is_waiting()
                    is_waiting = None
                until = self._deadline if is_waiting is None else min(self._deadline, say_so_at)
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
                        assert isinstance(answer, answer_type)
                        return answer
        raise NotAdmitted(
            f"{self._service} could not join: no answer from {self._coordinator} within {self._timeout_s:g} s; is a "
            "coordinator running there?"
        )


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
            raise KeyRefused(f"the coordinator at {self._address} does not accept the key of {self._keys_of}")
        else:
            self._failures.append(time.monotonic())
            if len(self._failures) >= _FAILURES and self._failures[-1] - self._failures[0] > _FAILING_S:
                raise TandemError(
                    f"the process that listens at {self._address} does not prove the coordinator's key that "
                    f"{self._keys_of} has: it belongs to another run, or is something else"
                )
