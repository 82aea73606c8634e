"""Sockets of those who are no members, and a wire that somebody listens to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import zmq

from tandem.common import curve
from tandem.common.curve import new_key_pair
from tandem.common.messages import Listener

KINDS = ("no key", "another server's key", "an unknown key", "a password")
"""Without CURVE; with it, but for another server; knowing the server's public key; with another mechanism."""


class Stranger:
    """Somebody who can reach a socket, and sends what a member would."""

    def __init__(self, kind: str, listener: Listener) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if kind == "a password":
            self._socket.setsockopt(zmq.PLAIN_USERNAME, b"member")
            self._socket.setsockopt(zmq.PLAIN_PASSWORD, b"password")
        elif kind != "no key":
            known = new_key_pair().public if kind == "another server's key" else listener.public_key
            curve.prove(self._socket, new_key_pair(), known)
        self._socket.connect(listener.address)

    def say(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message, if it goes out at all."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def heard(self) -> list[bytes]:
        """Return what has come, if anything."""
        return self._socket.recv_multipart() if self._socket.poll(0) else []

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@contextlib.contextmanager
def strangers(listener: Listener) -> Iterator[dict[str, Stranger]]:
    """Connect one of each kind."""
    with contextlib.ExitStack() as stack:
        made = {kind: Stranger(kind, listener) for kind in KINDS}
        for each in made.values():
            stack.callback(each.close)
        yield made


class Tap:
    """Passes bytes on between a port of its own and another, and keeps all of them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.bytes_ = bytearray()
        """Of both directions, as they came."""
        self.change: Callable[[bytes], bytes] = bytes
        """What is passed on in the place of what came."""
        self._ends: list[socket.socket] = []
        self._kept_open: set[socket.socket] = set()
        """Ends on the side of the other port that do not hear when the connection behind them breaks."""
        self._threads = [threading.Thread(target=self._accept, name="tap")]
        self._threads[0].start()

    def reset(self) -> None:
        """Break all connections on this side alone, as a firewall does that has forgotten them: those behind it stay.

        Whoever has connected is told at once; the other end knows nothing of it.
        """
        near, far = self._ends[::2], self._ends[1::2]
        self._kept_open |= {*far}
        for end in near:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break all connections."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for end in (*self._ends, self._listening):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                self._ends.append(near)
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends.append(far)
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ends, name="tap"))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while came := source.recv(1 << 16):
                self.bytes_ += came
                to.sendall(self.change(came))
        if to not in self._kept_open:
            with contextlib.suppress(OSError):
                to.shutdown(socket.SHUT_WR)
