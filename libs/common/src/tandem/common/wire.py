"""The wire: ZeroMQ sockets, framing and heartbeats; beside `curve` no other module imports zmq.

A message is two or more frames: the header (msgpack, one tagged union a link, see `tandem.common.messages`), the
manifest of its arrays (msgpack: name, dtype and shape of each), then one raw frame an array. Arrays are sent from and
received into their own memory: nothing copies them into msgpack and nothing is ever unpickled.

Every socket proves a key and hears those alone whom it knows by theirs (`tandem.common.keys`). All that crosses it is
encrypted.

The coordinator holds one ROUTER socket (`Hub`), every other process one DEALER (`Link`). A `Link` lives in a thread of
its own, so that heartbeats flow while the process computes, and so that a process whose coordinator is gone ends within
the heartbeat timeout whatever it is doing.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from tandem.common import curve
from tandem.common.curve import Admitted
from tandem.common.errors import ConfigError, NotAdmitted, TandemError, VersionMismatch, WireError
from tandem.common.keys import KeyPair, MemberKeys
from tandem.common.messages import (
    MAX_TEXT,
    PROTOCOL_VERSION,
    Enrolled,
    Goodbye,
    Heartbeat,
    Hello,
    Listener,
    Message,
    Refused,
    ServiceKind,
    Shutdown,
    TrainerKeys,
    Welcome,
)

Incoming = TypeVar("Incoming")
Answer = TypeVar("Answer", Welcome, Enrolled)
Arrays = Mapping[str, NDArray[Any]]
Frames = list[bytes | memoryview]

_ARRAY_KINDS = "biuf"
"""numpy kinds that may travel: booleans, integers, floats. Objects and strings may not."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no message; the last two for text that is none and for bottomless nesting."""

_MOST_ARRAYS = 64
_MOST_HEADER_BYTES, _MOST_MANIFEST_BYTES = 1 << 30, 1 << 16
"""What no message comes near: a header has the layout of a model at most, or the prompts of a step."""
_WHERE = re.compile(r"(.*?)(?: - at (`key` in )?`\$\.?(.*)`)?", re.DOTALL)
"""How msgspec says what is wrong, and where."""

MOST_BYTES_OF_REPLY = 1 << 28
"""Of a frame on its way to a coordinator: the layouts of an engine are some dozens of megabytes at most."""
_MOST_BYTES_OF_ORDER = 1 << 30
_MOST_WAITING = 1000
"""Messages of a connection."""
_EXIT_COORDINATOR_LOST = 70
EXIT_NOT_ADMITTED, EXIT_AWAITED_ANEW = 75, 76
"""Exit codes of a process that the run has no place for, perhaps only now, and of one that was told to go because the
run goes on with another in its place."""
_AT_ONCE_S = 1.0
_AGAIN_S = 0.2
_FAILURES, _FAILING_S = 5, 2.0
"""So many handshakes may fail, and for so long: a coordinator that ends breaks off some as well."""
_SHUTDOWN_GRACE_S = 5.0
"""Seconds a process has to end by itself after `Shutdown` before its link ends it."""


class ArrayHeader(msgspec.Struct, frozen=True, array_like=True):
    """How to read one raw frame."""

    name: Annotated[str, msgspec.Meta(max_length=100)]
    dtype: Annotated[str, msgspec.Meta(max_length=20)]
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=8)]


class Received(msgspec.Struct, Generic[Incoming], frozen=True):
    """A message and the arrays that came with it, as read-only views of the received frames."""

    message: Incoming
    arrays: dict[str, NDArray[Any]]


class _AnyTag(msgspec.Struct):
    """Reads the tag of any message, and which order it is or answers."""

    type: str
    command_id: int | None = None


_encoder = msgspec.msgpack.Encoder()
_tag_decoder = msgspec.msgpack.Decoder(_AnyTag)
_manifest_decoder = msgspec.msgpack.Decoder(list[ArrayHeader])
_trainer_keys_decoder = msgspec.msgpack.Decoder(TrainerKeys)
_shutdown_decoder = msgspec.msgpack.Decoder(Shutdown)


def encode(message: Message, arrays: Arrays | None = None) -> Frames:
    """Return the frames of a message; array frames are views of the arrays, which must not change until sent.

    Raises `WireError` for an array that is not of booleans, integers or floats.
    """
    frames: Frames = [_encoder.encode(message)]
    if arrays:
        frames.append(_encoder.encode([ArrayHeader(n, a.dtype.str, a.shape) for n, a in arrays.items()]))
        frames.extend(_to_frame(name, array) for name, array in arrays.items())
    return frames


def _to_frame(name: str, array: NDArray[Any]) -> bytes | memoryview:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise WireError(f"array {name!r} of dtype {array.dtype} may not travel")
    # Seen as bytes: a buffer of its own dtype could not be cast to them where the byte order is foreign. A zero-size
    # array has no memory to view; its frame is empty.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""


class Codec(Generic[Incoming]):
    """Decodes the messages of one direction of one kind of link."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(union)

    def decode(self, frames: Sequence[bytes | memoryview]) -> Received[Incoming]:
        """Return message and arrays. Raises `WireError` for anything that is not a message of this link."""
        _check_sizes(frames)
        try:
            message = self._decoder.decode(frames[0])
        except UNDECODABLE as error:
            raise _undecoded(frames[0], error) from error
        try:
            headers = _manifest_decoder.decode(frames[1]) if len(frames) > 1 else []
        except UNDECODABLE as error:
            raise WireError(f"not a message of this link: its list of arrays: {error}") from error
        if len(headers) != max(0, len(frames) - 2):
            raise WireError(f"{len(headers)} arrays announced, {max(0, len(frames) - 2)} came")
        arrays = {h.name: _to_array(h, frame) for h, frame in zip(headers, frames[2:], strict=True)}
        if len(arrays) != len(headers):
            raise WireError("two arrays of the same name")
        return Received(message, arrays)


def _check_sizes(frames: Sequence[bytes | memoryview]) -> None:
    """Refuse what is no message by its size, before any of it is read."""
    if not frames:
        raise WireError("empty message")
    if len(frames) > 2 + _MOST_ARRAYS:
        raise WireError(f"{len(frames)} frames, where a message has {_MOST_ARRAYS} arrays at most")
    for name, frame, most in zip(
        ("header", "list of arrays"), frames, (_MOST_HEADER_BYTES, _MOST_MANIFEST_BYTES), strict=False
    ):
        if len(frame) > most:
            raise WireError(f"a {name} of {len(frame)} bytes, where {most} are the most")


def _undecoded(frame: bytes | memoryview, error: Exception) -> WireError:
    """Say what is wrong with a header: in which message and field, and of which order, as far as that can be read."""
    try:
        tag = _tag_decoder.decode(frame)
    except UNDECODABLE:
        return WireError(f"not a message of this link: {error}")
    where = _WHERE.fullmatch(str(error))
    if not isinstance(error, msgspec.ValidationError) or where is None or where[3] == "type":
        return WireError(f"not a message of this link: {error}", tag.command_id)
    field = f".{where[3]}" if where[3] else ""
    of_key = "for a key: " if where[2] else ""
    return WireError(f"{tag.type}{field}: {of_key}{where[1]}", tag.command_id)


def _to_array(header: ArrayHeader, frame: bytes | memoryview) -> NDArray[Any]:
    try:
        dtype = np.dtype(header.dtype)
    except (TypeError, ValueError, SyntaxError) as error:  # numpy parses the text, and lets its parser's errors out
        raise WireError(f"array {header.name!r} has unknown dtype {header.dtype!r}") from error
    if dtype.kind not in _ARRAY_KINDS or min(header.shape, default=0) < 0:
        raise WireError(f"array {header.name!r} of dtype {header.dtype!r} and shape {header.shape} may not travel")
    if len(frame) != dtype.itemsize * math.prod(header.shape):
        raise WireError(f"array {header.name!r} should be {header.shape} {dtype}, but its frame has {len(frame)} bytes")
    try:
        array = np.frombuffer(frame, dtype=dtype).reshape(header.shape)
    except (ValueError, OverflowError) as error:  # zero elements, or few, in dimensions beyond what numpy can count
        raise WireError(f"array {header.name!r} has an impossible shape {header.shape}") from error
    array.flags.writeable = False  # the frame belongs to the message, which others may hold
    return array


class HelloProbe(msgspec.Struct, tag="Hello"):
    """The part of a `Hello` that every version can read, whatever the fields after the first have become."""

    protocol_version: int
    service: Any = "process"
    host: Any = "?"
    pid: Any = 0


def check_version(frame: bytes | memoryview) -> None:
    """Raise `VersionMismatch` if the frame is a `Hello` of another version, `WireError` if it is no `Hello`."""
    try:
        probe = msgspec.msgpack.decode(frame, type=HelloProbe)
    except UNDECODABLE as error:
        raise WireError(f"expected a Hello: {error}") from error
    if probe.protocol_version != PROTOCOL_VERSION:
        who = f"{probe.service} (pid {probe.pid} on {probe.host})"
        raise VersionMismatch(probe.protocol_version, PROTOCOL_VERSION, who)


class Peer(NamedTuple):
    """Whoever is at the other end of a connection to a `Hub`."""

    identity: bytes
    """Of its socket."""
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
        self._gatekeeper = curve.Gatekeeper(self._context, admitted)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDTIMEO, 5000)
        # What is sent is never dropped, nor does the loop wait for a slow receiver. Of what arrives, a connection may
        # have so much waiting here; the rest waits in its own sender.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
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


class Stalls:
    """How long a thread that listens to others was kept from it: who did not listen cannot say that they were silent.

    Its process, or the whole machine, was stopped, or its disk did not answer.
    """

    def __init__(self) -> None:
        self._listened_at = time.monotonic()

    def until(self, now: float, usual_s: float) -> float:
        """Return the seconds since the last call beyond the usual ones between two, to be taken off all silences."""
        stall_s = max(0.0, now - self._listened_at - usual_s)
        self._listened_at = now
        return stall_s


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


class Link(Generic[Incoming]):
    """A process's connection to its coordinator.

    `join` first; then `receive` from one thread, and `send` from any. Its own thread exchanges heartbeats and ends the
    whole process (exit code 70) when the coordinator has been silent for longer than the heartbeat timeout: a process
    without coordinator has nothing to save, and its memory has no name that could outlive it.
    """

    def __init__(
        self, coordinator: str, service: ServiceKind, identity: str, incoming: Any, keys: MemberKeys, keys_of: str = ""
    ) -> None:
        """Make a link that is not joined yet; `keys_of` says, for errors, where the keys are from."""
        self._coordinator = coordinator
        self._service = service
        self._codec: Codec[Incoming] = Codec(incoming)
        self._keys, self._keys_of = keys, keys_of or "this process"
        self.own = curve.new_key_pair() if keys.is_joining else keys.own
        """The keys of this process alone."""
        self.trainers = Admitted()
        """Keys of the run's trainers, as far as the coordinator has told them."""
        self._context = zmq.Context()
        self._identity = identity
        self._dealer = self._new_dealer(identity, self.own)
        # Between the process and the link's thread: one way each, since a socket is for one thread at a time.
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
        """Say hello until the coordinator answers; call `is_waiting` if it does not do so at once.

        Raises `ConfigError` for an address that is none, `NotAdmitted` if the coordinator refuses for now or
        does not answer, `TandemError` if it refuses for good or proves to be another run's.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if self._keys.is_joining:
                dealer = self._new_dealer(f"{self._identity}-joins", self._keys.own)
                with contextlib.closing(dealer):
                    said = msgspec.structs.replace(hello, enrols=self.own.public)
                    self._ask(dealer, said, Enrolled, deadline, timeout_s, is_waiting)
                is_waiting = None
            welcome = self._ask(self._dealer, hello, Welcome, deadline, timeout_s, is_waiting)
        except BaseException:
            self._close_sockets()
            raise
        self._start(welcome)
        return welcome

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
        with contextlib.closing(_Handshake(dealer, self._coordinator, self._keys_of)) as handshake:
            try:
                dealer.connect(self._coordinator)
            except zmq.ZMQError as error:
                raise ConfigError(f"--coordinator {self._coordinator!r}: {error.strerror}") from error
            dealer.send_multipart(encode(hello))
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
        dealer.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        dealer.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES_OF_ORDER)
        curve.prove(dealer, own, self._keys.coordinator)
        return dealer

    def set_phase(self, phase: str) -> None:
        """Say what the process is doing; the next heartbeat carries it."""
        self._phase = phase

    def send(self, frames: Frames) -> None:
        """Queue frames for the coordinator."""
        with self._sending:
            self._outgoing.send_multipart(frames, copy=False)

    def receive(self, timeout_s: float) -> Received[Incoming] | None:
        """Return the next message, or None after `timeout_s` or a `wake`. Heartbeats are not returned."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._woken in ready:
            os.eventfd_read(self._woken)
        if self._incoming not in ready:
            return None
        frames = self._incoming.recv_multipart(copy=False)
        return self._codec.decode([frame.buffer for frame in frames])

    def wake(self) -> None:
        """Have `receive` return at once, from any thread."""
        with self._sending:
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    def close(self, reason: str) -> None:
        """Say goodbye and stop the thread."""
        if self._thread is None:
            return
        self.send(encode(Goodbye(reason=reason[:MAX_TEXT])))
        self.send([b""])  # the end, for our own thread
        self._thread.join(timeout=_SHUTDOWN_GRACE_S)
        self._thread = None
        self._incoming.close()
        with self._sending:
            self._outgoing.close()
            self._close_woken()
        self._context.term()

    def _pipe(self, name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return the ends of a way between two threads: where messages come out, and where they go in."""
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

    def _start(self, welcome: Welcome) -> None:
        pump = _Pump(self._dealer, self._queued, self._arrived, welcome, lambda: self._phase, self.trainers)
        self._thread = threading.Thread(target=pump.run, name="link", daemon=True)
        self._thread.start()


class _Handshake:
    """Watches a socket connect: it need not wait for whoever will never speak to it.

    libzmq tries again whatever goes wrong, but for a key that was refused.
    """

    def __init__(self, dealer: zmq.Socket[bytes], address: str, keys_of: str) -> None:
        self._dealer = dealer
        self._address = address
        self._keys_of = keys_of
        self._failures: list[float] = []
        self._monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._poller = zmq.Poller()
        for socket in (dealer, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message or something to happen; say if there is a message.

        Raises `TandemError` once it is known that there will be none.
        """
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._monitor in ready:
            self._take(recv_monitor_message(self._monitor)["event"])
        return self._dealer in ready

    def close(self) -> None:
        """Watch no longer."""
        self._dealer.disable_monitor()
        self._monitor.close()

    def _take(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures.clear()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise TandemError(f"the coordinator at {self._address} does not accept the key of {self._keys_of}")
        else:
            self._failures.append(time.monotonic())
            if len(self._failures) >= _FAILURES and self._failures[-1] - self._failures[0] > _FAILING_S:
                raise TandemError(
                    f"who listens at {self._address} does not prove to be the coordinator that {self._keys_of} has the "
                    "key of: it is another run's, or something else"
                )


def exit_code(shutdown: Shutdown) -> int:
    """Return the exit code of a process that was told to go."""
    return EXIT_AWAITED_ANEW if shutdown.is_awaited_anew else 0


class _Pump:
    """The thread of a `Link`: moves frames between the process and the socket, beats, and watches the coordinator."""

    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        queued: zmq.Socket[bytes],
        arrived: zmq.Socket[bytes],
        welcome: Welcome,
        phase: Callable[[], str],
        trainers: Admitted,
    ) -> None:
        self._trainers = trainers
        self._trainer_keys = 0
        """The number of what was last told of them."""
        self._dealer = dealer
        self._queued = queued
        self._arrived = arrived
        self._welcome = welcome
        self._phase = phase
        self._end_code = 0

    def run(self) -> None:
        """Consume both sides until the process closes the link; never waits longer than a heartbeat interval."""
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._queued, zmq.POLLIN)
        interval = self._welcome.heartbeat_interval_s
        last_seen = last_beat = time.monotonic()
        stalls = Stalls()
        end_by = float("inf")
        while True:
            ready = dict(poller.poll(int(interval * 1000 / 2)))
            now = time.monotonic()
            last_seen += stalls.until(now, interval)
            if self._dealer in ready:
                last_seen = now
                if self._forward_incoming():
                    end_by = now + _SHUTDOWN_GRACE_S
            if self._queued in ready:
                frames = self._queued.recv_multipart(copy=False)
                if len(frames) == 1 and len(frames[0]) == 0:
                    break
                self._dealer.send_multipart(frames, copy=False)
            if now - last_beat >= interval:
                last_beat = now
                beat = Heartbeat(phase=self._phase()[:MAX_TEXT], trainer_keys=self._trainer_keys)
                self._dealer.send_multipart(encode(beat))
            if now - last_seen > self._welcome.heartbeat_timeout_s:
                self._end_process(
                    f"the coordinator was silent for {now - last_seen:.0f} s while {self._phase()}",
                    _EXIT_COORDINATOR_LOST,
                )
            if now > end_by:
                why = f"still {self._phase()} {_SHUTDOWN_GRACE_S:g} s after the coordinator's shutdown"
                self._end_process(why, self._end_code)
        self._dealer.close()
        self._queued.close()
        self._arrived.close()

    def _forward_incoming(self) -> bool:
        """Hand one message to the process, heartbeats and keys aside; True if it was a `Shutdown`."""
        frames = self._dealer.recv_multipart(copy=False)
        try:
            tag = _tag_decoder.decode(frames[0].buffer).type
            if tag == "TrainerKeys":
                told = _trainer_keys_decoder.decode(frames[0].buffer)
                self._trainers.replace(told.public_keys)
                self._trainer_keys = told.number
                return False
            if tag == "Shutdown":
                self._end_code = exit_code(_shutdown_decoder.decode(frames[0].buffer))
        except UNDECODABLE:
            tag = ""  # no message: `receive` says so, where somebody hears it
        if tag != "Heartbeat":
            self._arrived.send_multipart(frames, copy=False)
        return tag == "Shutdown"

    def _end_process(self, why: str, code: int) -> None:
        print(f"{self._welcome.member}: ending: {why}", file=sys.stderr, flush=True)
        os._exit(code)
