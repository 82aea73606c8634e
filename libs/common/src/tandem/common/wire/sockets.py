"""The sockets of the wire: keys, the most that waits, the largest messages; and what ends a wait."""

from __future__ import annotations

import contextlib
import os
import threading

import zmq

from tandem.common import curve
from tandem.common.keys import KeyPair

_MOST_BYTES_OF_ORDER = 1 << 30
_MOST_WAITING = 1000
"""Most received messages that wait on one connection."""


class Waker:
    """A file descriptor that is ready to be read once it was woken, until it is cleared."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, as pollers ask for it; -1 once it is closed."""
        return self._fd

    def wake(self) -> None:
        """End the wait, or the next one; from any thread, and after `close` without effect."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Take back what has woken it, if anything has."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


def make_router(context: zmq.Context[zmq.Socket[bytes]], key_pair: KeyPair, max_bytes: int) -> zmq.Socket[bytes]:
    """Return a ROUTER socket that proves its key, for clients that another program admits."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A reconnecting client keeps its identity. Its former connection may still look alive, if something between has
    # reset only one end. No other client can take it over, since none knows the identity.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.SNDTIMEO, 5000)
    # Sent messages are never dropped, and a slow receiver never blocks the loop. Received messages wait here up to
    # the limit per connection; the rest wait at their sender.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    curve.hear_processes(socket, key_pair)
    return socket


def make_dealer_of_link(
    context: zmq.Context[zmq.Socket[bytes]], identity: str, key_pair: KeyPair, coordinator: str
) -> zmq.Socket[bytes]:
    """Return a DEALER socket that proves a key to the coordinator, which must prove its own."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt_string(zmq.IDENTITY, identity)
    dealer.setsockopt(zmq.LINGER, 1000)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.setsockopt(zmq.RCVHWM, _MOST_WAITING)
    dealer.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES_OF_ORDER)
    curve.prove(dealer, key_pair, coordinator)
    return dealer


def make_dealer_of_caller(context: zmq.Context[zmq.Socket[bytes]], max_bytes: int) -> zmq.Socket[bytes]:
    """Return a DEALER socket for requests, which reconnects by itself."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    # ZeroMQ's own heartbeats, answered by its threads even in a busy process, detect hosts that vanish.
    dealer.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    dealer.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    return dealer


def make_pipe(context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return the ends of a pipe between two threads: the output, then the input."""
    ends = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in ends:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
    ends[0].bind(f"inproc://{name}")
    ends[1].connect(f"inproc://{name}")
    return ends
