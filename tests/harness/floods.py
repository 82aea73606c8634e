"""Strangers who flood a port: connections that say nothing, that stop half-way, and that are slow for ever."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from tandem.common import descriptors

Address = tuple[str, int]
NUM_IDLE, NUM_HALF_OPEN, NUM_SLOW = 1000, 100, 100
_TICK_S = 1.0
"""Pause between two bytes of slow headers, and before those that are cut off come again."""
_BREATH_S = 0.001
"""Pause after each connection: the clients of the test are other threads of its process."""
_HALVES = (
    b"GET / HT",
    b"POST / HTTP/1.1\r\nHost: localhost\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
)
_SLOW = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


class Flood:
    """Connections to one port, from a thread that makes those again which are cut off."""

    def __init__(self, at: Address) -> None:
        self._at = at
        self._says: list[bytes] = [
            *[b""] * NUM_IDLE,
            *[_HALVES[number % len(_HALVES)] for number in range(NUM_HALF_OPEN)],
            *[_SLOW] * NUM_SLOW,
        ]
        self._connections: list[socket.socket | None] = [None] * len(self._says)
        self._unsaid = [b""] * len(self._says)
        """What each connection has still to say."""
        self.num_made = 0
        """Connections so far."""
        self.num_cut_off = 0
        """Connections so far that the other side has ended."""
        self.rounds = 0
        """Times that all places were looked at."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flood")
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._ends.set()
        self._thread.join()
        for place in range(len(self._connections)):
            self._drop(place)

    def _run(self) -> None:
        while not self._ends.is_set():
            self._drop_ended()
            for place, says in enumerate(self._says):
                if self._connections[place] is None:
                    self._make(place)
                elif says is _SLOW:
                    self._unsaid[place] += b"x"
                self._send(place)
            self.rounds += 1
            self._ends.wait(_TICK_S)

    def _make(self, place: int) -> None:
        self._connections[place] = connection = socket.socket()
        self._unsaid[place] = self._says[place]
        connection.setblocking(False)
        connection.connect_ex(self._at)
        self.num_made += 1
        time.sleep(_BREATH_S)

    def _send(self, place: int) -> None:
        connection = self._connections[place]
        if connection is None or not self._unsaid[place]:
            return
        try:
            connection.send(self._unsaid[place])  # so few bytes go at once, or none do
            self._unsaid[place] = b""
        except BlockingIOError:  # it is not accepted yet
            return
        except OSError:
            self.num_cut_off += 1
            self._drop(place)

    def _drop_ended(self) -> None:
        """Drop the connections that the other side has ended, or answered with a refusal."""
        with selectors.DefaultSelector() as ready:
            for place, connection in enumerate(self._connections):
                if connection is not None:
                    ready.register(connection, selectors.EVENT_READ, place)
            for key, _ in ready.select(0):
                self.num_cut_off += 1
                self._drop(key.data)

    def _drop(self, place: int) -> None:
        connection, self._connections[place] = self._connections[place], None
        if connection is not None:
            connection.close()


@contextlib.contextmanager
def flooded(at: Address) -> Iterator[Flood]:
    """Flood a port."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors.raise_limit()
    try:
        with contextlib.closing(Flood(at)) as flood:
            yield flood
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
