"""Connections between all processes of a group, in which each proves its own key to every other.

Of two processes, the one of lower rank connects to the port of the other, and says hello until it is answered. From
then on a connection that breaks is lost for good. The connecting end hears of that from libzmq. The listening end
notices when it next sends, so it sends an empty frame now and then while it waits. Heartbeats of libzmq's own threads
break connections to hosts that vanish.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.common import curve
from tandem.common.curve import AdmittedKeys
from tandem.common.errors import WireError
from tandem.common.keys import Key, KeyPair
from tandem.common.wire.frames import Frames, memory_of
from tandem.common.wire.gatekeeper import Gatekeeper

_HELLO, _BEAT = b"hello", b""
_BEAT_S = 0.25
_POLL_S = 0.1
_HEARTBEAT_MS, _SILENCE_MS = 1000, 8000
_MOST_WAITING = 64
"""Most received messages that wait on one connection; the others wait at their sender."""
_MOST_IO_THREADS = 4
_MOST_TEXT = 200


class PeerConnections:
    """One process's connections to all others of its group. Used by one thread at a time."""

    def __init__(
        self, rank: int, names: Sequence[str], keys: Sequence[Key], key_pair: KeyPair, host: str, *, max_bytes: int
    ) -> None:
        """Listen on a free port of `host`, unless no process has a lower rank. Raises `WireError`.

        Args:
            rank: of this process.
            names: names of all processes of the group, by rank.
            keys: their public keys.
            key_pair: key pair of this process.
            host: address to listen on.
            max_bytes: size limit of a frame; a peer that sends a larger one is disconnected.
        """
        self._rank, self._names, self._keys, self._own = rank, tuple(names), tuple(keys), key_pair
        self._options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: 0,  # callers bound what they send at once
            zmq.RCVHWM: _MOST_WAITING,
            zmq.MAXMSGSIZE: max_bytes,
            zmq.IPV6: int(":" in host),
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: _SILENCE_MS,
            zmq.TCP_MAXRT: _SILENCE_MS,  # a heartbeat waits behind what cannot be sent
        }
        self._context = zmq.Context(max(1, min(_MOST_IO_THREADS, len(names) - 1)))
        self._poller = zmq.Poller()
        self._token = secrets.token_hex(16).encode()
        """Names this group of this time, so that no process takes another for it."""
        self._router: zmq.Socket[bytes] | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._tokens: dict[int, bytes] = {}
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        self._identities: dict[int, bytes] = {}
        """Identities of the sockets of lower rank."""
        self._ranks: dict[bytes, int] = {}
        """Ranks by these identities."""
        self._joined: set[int] = set()
        self._next_beat = 0.0
        self.lost: dict[int, str] = {}
        """Processes whose connection is lost, by rank, and why."""
        self.at = ""
        """Where processes of lower rank find this one."""
        if rank:
            self.at = self._listen(host)

    def missing(self) -> list[str]:
        """Return the processes that are not connected yet."""
        return [name for rank, name in enumerate(self._names) if rank not in self._joined and rank != self._rank]

    def join(self, places: Mapping[int, str], deadline: float) -> None:
        """Connect to the processes of higher rank, whose `at` is given, and wait until every process is connected.

        Raises `WireError`; it names the processes that are missing at the deadline.
        """
        for rank, place in places.items():
            self._connect(rank, place)
        while missing := self.missing():
            if time.monotonic() > deadline:
                raise WireError(f"the deadline passed before {', '.join(missing)} had proven a key of the group")
            for _ in self.receive(_POLL_S):
                pass  # a process sends nothing but hello until all are connected to it
            if self.lost:
                raise WireError("; ".join(self.lost.values()))

    def send(self, rank: int, frames: Frames) -> None:
        """Send to one process; large frames are not copied, and must not change until the peer has them.

        If the connection is gone, the process is `lost`.
        """
        if rank in self.lost:
            return
        try:
            if rank in self._dealers:
                self._dealers[rank].send_multipart(frames, zmq.NOBLOCK, copy=False)
            elif self._router is not None:
                self._router.send_multipart([self._identities[rank], *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._lose(rank, "has closed its connection")

    def receive(self, timeout_s: float) -> Iterator[tuple[int, list[memoryview]]]:
        """Wait up to `timeout_s` for an event; yield what processes have sent, each with its rank.

        Whatever a process sent before it was lost is yielded before it is `lost`, or by the next call.
        """
        self._beat()
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._router is not None and self._router in ready:
            yield from self._heard(self._router)
        for rank, dealer in [*self._dealers.items()]:
            if dealer in ready:
                yield from self._answered(rank, dealer)
        for monitor in [each for each in self._monitors if each in ready]:
            self._take_event(self._monitors[monitor], recv_monitor_message(monitor)["event"])

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections and the port, giving sent messages some seconds to leave."""
        for monitor, rank in self._monitors.items():
            self._dealers[rank].disable_monitor()
            monitor.close()
        self._monitors.clear()
        for zmq_socket in (*self._dealers.values(), *([self._router] if self._router else [])):
            zmq_socket.close(int(linger_s * 1000))
        self._context.term()
        if self._gatekeeper is not None:
            self._gatekeeper.join()

    def _listen(self, host: str) -> str:
        self._router = self._context.socket(zmq.ROUTER)
        self._gatekeeper = Gatekeeper(self._context, AdmittedKeys(self._keys), self._router)
        self._set_options(self._router)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        curve.hear_processes(self._router, self._own)
        try:
            self._router.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self.close()
            raise WireError(f"cannot listen on {host!r}: {error.strerror}") from error
        self._poller.register(self._router, zmq.POLLIN)
        return f"{self._router.getsockopt_string(zmq.LAST_ENDPOINT)} {self._token.decode()}"

    def _connect(self, rank: int, place: str) -> None:
        address, _, token = place.partition(" ")
        if not address.startswith("tcp://") or len(place) > _MOST_TEXT:
            raise WireError(f"{self._names[rank]} cannot be reached at {place[:_MOST_TEXT]!r}")
        self._tokens[rank] = token.encode()
        dealer = self._dealers[rank] = self._context.socket(zmq.DEALER)
        self._set_options(dealer)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        monitor = dealer.get_monitor_socket(events, f"inproc://peer-{rank}")
        self._monitors[monitor] = rank
        for zmq_socket in (dealer, monitor):
            self._poller.register(zmq_socket, zmq.POLLIN)
        try:
            curve.prove(dealer, self._own, self._keys[rank])
            dealer.connect(address)
        except zmq.ZMQError as error:
            raise WireError(f"{self._names[rank]} cannot be reached at {address!r}: {error.strerror}") from error

    def _set_options(self, socket: zmq.Socket[bytes]) -> None:
        for option, value in self._options.items():
            socket.setsockopt(option, value)

    def _heard(self, router: zmq.Socket[bytes]) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield what has come from processes of lower rank, and answer those that say hello."""
        with contextlib.suppress(zmq.Again):
            while True:
                sender, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
                identity, key = sender.bytes, curve.derive_key(sender)
                rank = self._ranks.get(identity)
                if frames[0].bytes == _HELLO:
                    self._welcome(identity, key, frames[1:])
                elif rank is not None and rank not in self.lost and key == self._keys[rank]:
                    yield rank, [*map(memory_of, frames)]

    def _welcome(self, identity: bytes, key: str, frames: Sequence[zmq.Frame]) -> None:
        """Answer a process that says hello, if it is one of the group's and not connected yet."""
        if len(frames) != 2 or frames[0].bytes != self._token or not frames[1].bytes.isdigit():
            return
        rank = int(frames[1].bytes[:9])
        if rank >= self._rank or self._keys[rank] != key:
            return
        if rank in self._joined and not self.missing():
            self._lose(rank, "has lost its connection")
            return
        self._ranks.pop(self._identities.get(rank, b""), None)
        self._identities[rank], self._ranks[identity] = identity, rank
        self._joined.add(rank)
        self.send(rank, [_HELLO])

    def _answered(self, rank: int, dealer: zmq.Socket[bytes]) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield what has come from a process of higher rank."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = dealer.recv_multipart(zmq.NOBLOCK, copy=False)
                if frames[0].bytes == _HELLO:
                    self._joined.add(rank)
                elif frames[0].bytes != _BEAT and rank in self._joined:
                    yield rank, [*map(memory_of, frames)]

    def _take_event(self, rank: int, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.send(rank, [_HELLO, self._tokens[rank], str(self._rank).encode()])
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._lose(rank, "does not accept the key of this process")
        elif event == zmq.EVENT_DISCONNECTED and rank in self._joined:
            self._lose(rank, "has closed its connection")

    def _beat(self) -> None:
        """Try the connections from processes of lower rank, if it is time."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_S
            for rank in self._identities:
                self.send(rank, [_BEAT])

    def _lose(self, rank: int, reason: str) -> None:
        self.lost.setdefault(rank, f"{self._names[rank]} {reason}")
