"""Messages between a coordinator and its supervisor, over an inherited socket pair.

    coordinator ─▶ supervisor   `Alive`: a sign of life. `BegunRun`: the folder of a run has all that it reads.
                                `Keep`: a child of the supervisor outlives the coordinator.
                                `Replaced`: processes were replaced. `GoBack`: the newest checkpoint is damaged.
                                `Final`: another coordinator would end the same way.
    supervisor ─▶ coordinator   `InitialState`, first: what became of the previous one. `ProcessEnd`: how a child ended.

Engines and the refit service are children of the supervisor (`tandem.launch.supervisor`). The kernel
ends them with the supervisor, not with the coordinator, and the supervisor reports their ends to the coordinator.

The run's loop sends signs of life, which show that it advances. Before it, between two loops and after the last one, a
thread sends them, which shows that the process is not stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from tandem.common.errors import TandemError
from tandem.config import Config, load_config
from tandem.config.schema import ClusterConfig
from tandem.launch.child import ForkedChild

_MOST_BYTES = 1 << 16
_SIGNS = 20
"""Signs of life sent within the time limit for one."""
_MOST_TIMEOUTS = 2.0
"""Heartbeat timeouts without a round of the loop, after which the supervisor starts another coordinator. Services wait
for one timeout, and a disk may have blocked the loop for another."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The coordinator is alive."""

    within_s: float
    """Longest time until the next sign of life."""


class BegunRun(msgspec.Struct, frozen=True, tag=True):
    """The run, or a prerequisite of it, has begun: its folder has its configuration and the files that it reads."""

    folder: str


class Replaced(msgspec.Struct, frozen=True, tag=True):
    """The run has replaced lost processes."""

    count: int


class GoBack(msgspec.Struct, frozen=True, tag=True):
    """The newest checkpoint is damaged; another coordinator must resume from an earlier one."""

    step: int
    """Step of the newest undamaged checkpoint."""


class Final(msgspec.Struct, frozen=True, tag=True):
    """The run ends for a reason that would stop another coordinator too: the user must change something."""


class Keep(msgspec.Struct, frozen=True, tag=True):
    """A child of the supervisor is to outlive the coordinator."""

    name: str
    pid: int


class InitialState(msgspec.Struct, frozen=True, tag=True):
    """The state with which a coordinator begins."""

    why: str = ""
    """Reason why the previous coordinator was lost; empty if there was none."""
    kept: dict[str, int] = {}
    """Process ids of kept processes, by name."""
    replaced_at: tuple[float, ...] = ()
    """Times at which processes and coordinators were replaced, by `time.monotonic`."""


class ProcessEnd(msgspec.Struct, frozen=True, tag=True):
    """A kept process has ended."""

    pid: int
    code: int
    """Exit code; negative: the signal that ended it."""


FromCoordinator: TypeAlias = Alive | BegunRun | Keep | Replaced | GoBack | Final
to_supervisor: msgspec.json.Decoder[FromCoordinator] = msgspec.json.Decoder(FromCoordinator)
_to_coordinator: msgspec.json.Decoder[InitialState | ProcessEnd] = msgspec.json.Decoder(InitialState | ProcessEnd)


def make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a non-blocking socket pair that preserves messages."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def say(end: socket.socket, message: FromCoordinator | InitialState | ProcessEnd) -> None:
    """Send a message to the other end, if it is there and listens."""
    with contextlib.suppress(OSError):
        end.send(msgspec.json.encode(message))


def hear(end: socket.socket) -> bytes:
    """Return the next message from the other end; empty if there is none."""
    with contextlib.suppress(OSError):
        return end.recv(_MOST_BYTES)
    return b""


class SupervisorConnection:
    """The coordinator's end of the socket pair."""

    def __init__(
        self,
        descriptor: int,
        supervisor: int,
        cluster: ClusterConfig,
        load_config: Callable[[str], Config] = load_config,
    ) -> None:
        """Take over the socket from `supervisor`, the parent of this process. `cluster` has the time limits.

        `load_config` returns the configuration of a prerequisite, by its path.
        """
        self.pid = supervisor
        self.load_config = load_config
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        os.set_inheritable(descriptor, False)
        begun = _to_coordinator.decode(hear(self._socket))
        assert isinstance(begun, InitialState), "the supervisor says so first"
        self.begun = begun
        self._round_s, self._start_s = _MOST_TIMEOUTS * cluster.heartbeat_timeout_s, cluster.deadlines.join_s
        self._codes: dict[int, int] = {}
        self._next_sign = 0.0
        self._is_in_loop = False
        self.has_run = False
        """Whether the run's loop has gone round: later errors of the coordinator are not due to settings."""

    def start(self) -> None:
        """Start a thread that sends signs of life until this process ends."""
        threading.Thread(target=self._show_presence, name="sign of life", daemon=True).start()

    def _show_presence(self) -> None:
        while True:
            if not self._is_in_loop:
                say(self._socket, Alive(self._start_s))
            time.sleep(self._start_s / _SIGNS)

    def show_life(self) -> None:
        """Report that this process's loop advances; call it often."""
        self._is_in_loop = self.has_run = True
        now = time.monotonic()
        if now >= self._next_sign:
            self._next_sign = now + self._round_s / _SIGNS
            say(self._socket, Alive(self._round_s))

    def leave_loop(self) -> None:
        """Make the supervisor expect only that this process lives, not that its loop advances."""
        self._is_in_loop, self._next_sign = False, 0.0
        say(self._socket, Alive(self._start_s))

    def note_begun(self, folder: Path) -> None:
        """Report that the run of this folder has begun: the next coordinator uses what the folder has."""
        say(self._socket, BegunRun(str(folder)))

    def replaced(self, count: int) -> None:
        """Report replaced processes, which the whole run limits."""
        say(self._socket, Replaced(count))

    def go_back(self, step: int) -> None:
        """Make another coordinator resume from the checkpoint of a step, once this one has ended."""
        say(self._socket, GoBack(step))

    def fail(self, error: TandemError) -> None:
        """Prevent another coordinator if this one has failed before its loop, and another would fail alike.

        One that takes another's place goes on with what that began with; only an error of the user's is final then.
        """
        if not self.has_run and (error.is_final or not self.begun.why):
            self.give_up()

    def give_up(self) -> None:
        """Prevent another coordinator from resuming once this one has ended."""
        say(self._socket, Final())

    def keep(self, name: str, pid: int) -> ForkedChild:
        """Make a child of the supervisor outlive this process; return it."""
        if self.code_of(pid) is not None:  # the code of an earlier process with the same id
            del self._codes[pid]
        say(self._socket, Keep(name, pid))
        return KeptChild(pid, self)

    def child(self, pid: int) -> ForkedChild:
        """Return a process that has outlived an earlier coordinator."""
        return KeptChild(pid, self)

    def code_of(self, pid: int) -> int | None:
        """Return the exit code of a kept process; None if it has not ended."""
        while message := hear(self._socket):
            ended = _to_coordinator.decode(message)
            assert isinstance(ended, ProcessEnd)
            self._codes[ended.pid] = ended.code
        return self._codes.get(pid)


class KeptChild(ForkedChild):
    """A child of the supervisor, which reports how it ends."""

    def __init__(self, pid: int, supervision: SupervisorConnection) -> None:
        super().__init__(pid)
        self._supervision = supervision

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._supervision.code_of(self.pid)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            super().send_signal(number)
