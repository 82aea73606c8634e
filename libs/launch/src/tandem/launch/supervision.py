"""What a coordinator and its supervisor tell each other, over a socket pair that is inherited.

    coordinator ─▶ supervisor   `Alive`: a sign of life; `Keep`: a child of the supervisor's outlives the coordinator;
                                `Replaced`: processes were; `GoBack`: the newest checkpoint is damaged;
                                `Final`: another coordinator would end as this one does
    supervisor ─▶ coordinator   `Begun`, first: what became of the one before; `Ended`: how such a child ended

Engines and the refit service are children of the supervisor (`tandem.coordinator.commands.supervision`): the kernel
ends them with it, and not with the coordinator, which the supervisor tells how they end.

Signs of life come from the loop of a run, which shows that it goes round. Where there is none, before it, between two
and after the last, they come from a thread, which shows that the process is not stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import TypeAlias

import msgspec

from tandem.config.schema import Cluster
from tandem.launch.fork_server import Child

_MOST_BYTES = 1 << 16
_SIGNS = 20
"""Of life, within the time in which there must be one."""
_MOST_TIMEOUTS = 2.0
"""Heartbeat timeouts without a round of the loop, after which its supervisor has another coordinator: services wait for
it after one, and a disk may have held it up for as long."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The coordinator is alive."""

    within_s: float
    """How soon it says so again, at the latest."""


class Replaced(msgspec.Struct, frozen=True, tag=True):
    """Processes were replaced that the run has lost."""

    count: int


class GoBack(msgspec.Struct, frozen=True, tag=True):
    """The newest checkpoint is damaged; another coordinator is to go on from an earlier one."""

    step: int
    """The step of the newest checkpoint that is whole."""


class Final(msgspec.Struct, frozen=True, tag=True):
    """The run ends for a reason that another coordinator would meet as well: the user is to change something."""


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
    replaced_at: tuple[float, ...] = ()
    """When processes were, and coordinators, by `time.monotonic`."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process that was kept has ended."""

    pid: int
    code: int
    """Negative: the signal that ended it."""


FromCoordinator: TypeAlias = Alive | Keep | Replaced | GoBack | Final
to_supervisor: msgspec.json.Decoder[FromCoordinator] = msgspec.json.Decoder(FromCoordinator)
_to_coordinator: msgspec.json.Decoder[Begun | Ended] = msgspec.json.Decoder(Begun | Ended)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends; what is sent stays apart, and nobody waits to send it."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def say(end: socket.socket, what: FromCoordinator | Begun | Ended) -> None:
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

    def __init__(self, descriptor: int, supervisor: int, cluster: Cluster) -> None:
        """`supervisor` is the parent of this process. `cluster` says how long what may take."""
        self.pid = supervisor
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        os.set_inheritable(descriptor, False)
        begun = _to_coordinator.decode(hear(self._socket))
        assert isinstance(begun, Begun), "the supervisor says so first"
        self.begun = begun
        self._round_s, self._start_s = _MOST_TIMEOUTS * cluster.heartbeat_timeout_s, cluster.deadlines.join_s
        self._codes: dict[int, int] = {}
        self._next_sign = 0.0
        self._is_in_loop = False
        self.has_run = False
        """Whether the loop of the run has gone round: an error of the coordinator's after that is nobody's settings."""

    def start(self) -> None:
        """Show from now on that this process is there, by a thread, until it ends."""
        threading.Thread(target=self._show_presence, name="sign of life", daemon=True).start()

    def _show_presence(self) -> None:
        while True:
            if not self._is_in_loop:
                say(self._socket, Alive(self._start_s))
            time.sleep(self._start_s / _SIGNS)

    def show_life(self) -> None:
        """Say that the loop of this process goes round; to be called often."""
        self._is_in_loop = self.has_run = True
        now = time.monotonic()
        if now >= self._next_sign:
            self._next_sign = now + self._round_s / _SIGNS
            say(self._socket, Alive(self._round_s))

    def rest(self) -> None:
        """Have the supervisor wait for no round of the loop, but only for this process to be there."""
        self._is_in_loop, self._next_sign = False, 0.0
        say(self._socket, Alive(self._start_s))

    def replaced(self, count: int) -> None:
        """Say that processes were replaced: of so many there may be in the whole run."""
        say(self._socket, Replaced(count))

    def go_back(self, step: int) -> None:
        """Have another coordinator go on from the checkpoint of a step, when this one has ended."""
        say(self._socket, GoBack(step))

    def give_up(self) -> None:
        """Have no other coordinator go on, when this one has ended."""
        say(self._socket, Final())

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
