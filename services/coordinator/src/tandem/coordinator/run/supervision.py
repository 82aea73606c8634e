"""What a coordinator and its supervisor tell each other, over a socket pair that is inherited.

    coordinator ─▶ supervisor   `Alive`: a sign of life; `Keep`: a child of the supervisor's outlives the coordinator
    supervisor ─▶ coordinator   `Begun`, first: what became of the one before; `Ended`: how such a child ended

Engines and the refit service are children of the supervisor (`tandem.coordinator.commands.supervision`): the kernel
ends them with it, and not with the coordinator, which the supervisor tells how they end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import msgspec

from tandem.coordinator.run.fork_server import Child

_MOST_BYTES = 1 << 16
_SIGNS = 20
"""Of life, within the time in which there must be one."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The coordinator is alive."""

    within_s: float | None = None
    """How soon it says so again, at the latest; None if it cannot tell."""


class Keep(msgspec.Struct, frozen=True, tag=True):
    """A child of the supervisor's is to outlive the coordinator."""

    name: str
    pid: int


class Begun(msgspec.Struct, frozen=True, tag=True):
    """What a coordinator begins with."""

    why: str = ""
    """Why the one before was lost; empty if there was none."""
    kept: dict[str, int] = {}
    """Processes by name."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process that was kept has ended."""

    pid: int
    code: int
    """Negative: the signal that ended it."""


to_supervisor: msgspec.json.Decoder[Alive | Keep] = msgspec.json.Decoder(Alive | Keep)
_to_coordinator: msgspec.json.Decoder[Begun | Ended] = msgspec.json.Decoder(Begun | Ended)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends; what is sent stays apart, and nobody waits to send it."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def say(end: socket.socket, what: Alive | Keep | Begun | Ended) -> None:
    """Tell the other end something, if it is there and listens."""
    with contextlib.suppress(OSError):
        end.send(msgspec.json.encode(what))


def hear(end: socket.socket) -> bytes:
    """Return what the other end has said next; nothing if that is nothing."""
    with contextlib.suppress(OSError):
        return end.recv(_MOST_BYTES)
    return b""


class Supervision:
    """The coordinator's end."""

    def __init__(self, descriptor: int, supervisor: int) -> None:
        """`supervisor` is the parent of this process."""
        self.pid = supervisor
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        os.set_inheritable(descriptor, False)
        begun = _to_coordinator.decode(hear(self._socket))
        assert isinstance(begun, Begun), "the supervisor says so first"
        self.begun = begun
        self._codes: dict[int, int] = {}
        self._next_sign = 0.0

    def show_life(self, within_s: float) -> None:
        """Say that this process is alive, and when it says so again at the latest; to be called often."""
        now = time.monotonic()
        if now >= self._next_sign:
            self._next_sign = now + within_s / _SIGNS
            say(self._socket, Alive(within_s))

    def rest(self) -> None:
        """Have the supervisor wait for no sign of life."""
        self._next_sign = 0.0
        say(self._socket, Alive())

    def keep(self, name: str, pid: int) -> Child:
        """Have a child of the supervisor's outlive this process; return it."""
        if self.code_of(pid) is not None:  # that of another, which had the id before
            del self._codes[pid]
        say(self._socket, Keep(name, pid))
        return Kept(pid, self)

    def child(self, pid: int) -> Child:
        """Return a process that has outlived an earlier coordinator."""
        return Kept(pid, self)

    def code_of(self, pid: int) -> int | None:
        """Return how a process has ended that is kept, None if it has not."""
        while message := hear(self._socket):
            ended = _to_coordinator.decode(message)
            assert isinstance(ended, Ended)
            self._codes[ended.pid] = ended.code
        return self._codes.get(pid)


class Kept(Child):
    """A child of the supervisor's, which says how it ends."""

    def __init__(self, pid: int, supervision: Supervision) -> None:
        super().__init__(pid)
        self._supervision = supervision

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._supervision.code_of(self.pid)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            super().send_signal(number)
