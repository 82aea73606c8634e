"""One node's processes of a run with its coordinator on another node, watched until they end.

Services do not know this process. Each registers with the coordinator by itself, under its own number, and is restarted
here when it dies. They die with this process, even after kill -9.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tandem.common import signals
from tandem.common.errors import NotAdmitted
from tandem.common.wire import EXIT_AWAITED_ANEW, EXIT_NOT_ADMITTED
from tandem.launch import child, launch, nodes

_POLL_S = 0.1
_RETRY_S = 2.0
"""Pause before restarting a process that was not admitted: a lost one's place may not be free yet, for example."""


class ByKeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials for another node's coordinator: each service asks for its number, and proves the run's key file."""

    coordinator: str
    key_file: Path
    timeout_s: float
    is_numbered: bool = True
    """Whether a service asks for the number that it has here, and not for any that is free."""

    def __call__(self, number: int) -> launch.ProcessCredentials:
        """Return the credentials of one process."""
        index = ("--index", str(number)) if self.is_numbered else ()
        words = ("--coordinator", self.coordinator, "--key-file", str(self.key_file), *index)
        return launch.ProcessCredentials(arguments=(*words, "--join-timeout", f"{self.timeout_s:g}"))


class JoinLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits after which a node gives up."""

    admission_s: float
    """Longest time that a process may go without admission, since it was lost or first started."""
    max_replacements: int
    """Limit of the run; the coordinator counts the losses of all nodes. This node gives up when it alone has lost more
    within `replacement_window_s`."""
    replacement_window_s: float
    grace_s: float
    """Time for services after this process was asked to end: the coordinator finishes a step, and saves."""


class NodeProcesses:
    """The services of one node."""

    def __init__(
        self, node: nodes.NodeShare, processes: launch.LocalProcesses, limits: JoinLimits, say: Callable[[str], None]
    ) -> None:
        self._processes = processes
        self._limits = limits
        self._say = say
        self._node = node
        self._losses: dict[str, list[float]] = {}
        """Times of each process's losses."""
        self._asks_since: dict[str, float] = {}
        """Since when each process has gone without admission, as far as this node knows."""
        self._again_at: dict[str, tuple[float, child.LaunchedProcess]] = {}
        self._end_by: float | None = None
        self.failures: list[str] = []
        """Processes that ended before the run did, one line each."""

    def run(self) -> None:
        """Start the services, and return when all have ended, or one is lost for good."""
        with signals.hear_signals(self._hear_signal):
            for kind, number in self._node.processes:
                launched = self._processes.start(kind, number)
                self._asks_since[launched.name] = time.monotonic()
                self._say(f"{launched.name}: process {launched.process.pid}, log {launched.log}")
            running = {f"{kind}-{number}" for kind, number in self._node.processes}
            while running and not self.failures and not self._is_over():
                for launched in self._processes.died():
                    if self._stays_away(launched):
                        running.discard(launched.name)
                self._start_those_due()
                time.sleep(_POLL_S)

    def _hear_signal(self, number: int) -> None:
        """Give services their time at the first signal to end, and none at the second."""
        now = time.monotonic()
        self._end_by = now + self._limits.grace_s if self._end_by is None else now

    def _is_over(self) -> bool:
        return self._end_by is not None and time.monotonic() >= self._end_by

    def _stays_away(self, launched: child.LaunchedProcess) -> bool:
        """Decide what to do about an ended process; return True if it has no place in the run any more."""
        code, now = launched.process.wait(0.0), time.monotonic()
        if code == 0 or self._end_by is not None:
            return True
        if code == EXIT_AWAITED_ANEW:
            self._asks_since[launched.name] = now
            self._again_at[launched.name] = (now, launched)
            return False
        if code == EXIT_NOT_ADMITTED:
            if now - self._asks_since[launched.name] > self._limits.admission_s:
                self.failures.append(f"{launched.name}: {launched.describe_death()}")
                return True
            self._again_at[launched.name] = (now + _RETRY_S, launched)
            return False
        self._losses.setdefault(launched.name, []).append(now)
        if self._num_lost(now) > self._limits.max_replacements:
            many = f"this node has lost more processes than cluster.max_replacements ({self._limits.max_replacements})"
            self.failures.append(f"{launched.name}: {launched.describe_death()}; {many}")
            return True
        self._say(f"{launched.name}: {launched.describe_death()}; started again")
        self._asks_since[launched.name] = now
        self._again_at[launched.name] = (now, launched)
        return False

    def _num_lost(self, now: float) -> int:
        """Return the least number of losses that the run counts: trainers restarted together count as one."""
        window_s = self._limits.replacement_window_s
        losses = {name: len(child.select_within(window_s, now, times)) for name, times in self._losses.items()}
        of_trainers = [count for name, count in losses.items() if name.startswith("trainer-")]
        return sum(losses.values()) - sum(of_trainers) + max(of_trainers, default=0)

    def _start_those_due(self) -> None:
        for name, (when, launched) in list(self._again_at.items()):
            if time.monotonic() >= when:
                del self._again_at[name]
                self._processes.start(launched.kind, launched.number)


def wait_for_key_file(path: Path, timeout_s: float, say: Callable[[str], None]) -> None:
    """Wait until the coordinator has written the run's key file. Raises `NotAdmitted` if it does not in time."""
    deadline = time.monotonic() + timeout_s
    if not path.exists():
        say(f"waiting for the run's key file {path}, up to {timeout_s:g} s")
    while not path.exists():
        if time.monotonic() > deadline:
            raise NotAdmitted(f"--key-file {path}: there is no such file after {timeout_s:g} s; is the run up?")
        time.sleep(_POLL_S)
