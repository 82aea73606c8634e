"""``coordinator up --supervise``: start the coordinator again when it is killed, or hangs.

The coordinator is a child of this process, and so are the engines and the refit service that it launches: they outlive
it, and end with this process. The coordinator's other children end with it. The next coordinator resumes the run as
``--resume`` does, at the address of the dead one, with the configuration, data and code that the run began with. It
takes over the processes that are left.

The next coordinator begins

- at once, if the last one was ended by a signal that this process did not pass on, or sent no heartbeat in time.
- at once, from the newest checkpoint that is whole, if the last one found a later one damaged.
- after a pause, if it failed for a reason other than the user's: replacements ran out, an unexpected error.
- not at all, if the reason is the user's (`TandemError.is_final`), the input is invalid, or it was asked to end.

The pause doubles from one to the next, and starts again after a coordinator that has lived for a while.

The loop of this process consumes the coordinator's messages, and deaths; it waits at most `_LOOK_S` at a time.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tandem.common import signals
from tandem.common.descriptors import wait_to_read
from tandem.common.errors import BAD_INPUT, FAILED, INTERRUPTED, OK, RunFolderError
from tandem.common.process_lifetime import LONGEST_DISK_WAIT_S, adopt_orphans, is_waiting_for_disk, list_descendants

if TYPE_CHECKING:
    import socket

    from tandem.common.wire import ThreadStalls
    from tandem.config.schema import ClusterConfig

_COORDINATOR = (sys.executable, "-m", "tandem.coordinator.cli", "up")
_GONE_S = 20.0
"""Time for the children of a dead coordinator to end, before they are killed."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after the first coordinator that failed by itself, and the longest one."""
_LIVED_S = 600.0
"""Life of a coordinator after which the next pause is the first again."""
_LOOK_S, _LOOKED_S = 0.1, 1.0
"""Interval between two looks, and the delay from which a look counts as late."""
_AFTER_DISK_S = 5.0
"""Time for a coordinator's next sign of life, once its disk has answered."""


class _End(NamedTuple):
    """The end of a coordinator."""

    reason: str
    """Reason, for the next coordinator."""
    description: str
    """Reason, for the user."""
    is_its_own: bool = False
    """Whether the coordinator failed by itself."""


class Supervisor:
    """A loop that starts one coordinator of a run after another."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        cluster: ClusterConfig,
        program: Sequence[str] = _COORDINATOR,
        configs: bytes = b"",
    ) -> None:
        """`words` follow ``coordinator up``, without those for how it begins. `cluster` holds the limits.

        `configs` holds the configurations of the run and its prerequisites, for every coordinator, whatever their
        files say by then.
        """
        self._program = program
        self._configs = configs
        self._words = words
        self._folder = folder
        self._most, self._window_s = cluster.max_replacements, cluster.replacement_window_s
        self._start_s = cluster.deadlines.join_s
        """Deadline of a coordinator's first heartbeat."""
        self._replaced_at: list[float] = []
        """Times at which processes and coordinators were replaced."""
        self._pause_s = 0.0
        """Pause before the next coordinator, where one has failed by itself."""
        self._is_final = False
        """Whether the coordinator has reported that another would end in the same way."""
        self._begun: dict[str, None] = {}
        """Folders of the runs that have begun: of the run's prerequisites, and its own."""
        self._asked: list[int] = []
        """Signals that asked the run to end."""
        self._pid: int | None = None
        """Process id of the coordinator."""
        self._alive_by = math.inf
        """Time by which its next heartbeat is due."""
        self._spared_until = 0.0
        """Time until which it is not killed for silence, since it has waited for a disk."""
        self._silent_s: float | None = None
        """Length of its silence, if it was killed for that."""
        self._kept: dict[int, str] = {}
        """Children that outlive it, and their names."""
        self._ended: dict[int, tuple[int, float]] = {}
        """Exit codes of children that have just ended, with the time."""
        self._within_s = self._start_s
        """Time from the last heartbeat to the next one's deadline."""
        self._whole: int | None = None
        """Step of the newest whole checkpoint, if the coordinator found a later one damaged."""

    def run(self, start_words: Sequence[str]) -> int:
        """Bring the run to its end; `start_words` are the words for how it begins. Return the exit code."""
        from tandem.launch.child import select_within

        before, reason = self._run_id(), ""
        adopt_orphans()
        with signals.hear_signals(self._pass_on):
            while True:
                began = time.monotonic()
                code = self._run_once(start_words, reason)
                if code in (OK, BAD_INPUT, INTERRUPTED) or (code > 0 and self._is_final):
                    return code
                end = self._describe(code)
                reason = end.reason
                self._await_the_others()
                if self._asked:
                    return code if code > 0 else INTERRUPTED
                now = time.monotonic()
                self._replaced_at = select_within(self._window_s, now, self._replaced_at)
                if len(self._replaced_at) >= self._most:
                    break
                self._replaced_at.append(now)
                # The run continues with the files that it began with, whatever they say by now.
                began_in = [word for folder in self._begun for word in ("--began-in", folder)]
                if self._whole is not None:
                    start_words, self._whole = ["--resume", "--from", str(self._whole), *began_in], None
                elif str(self._folder) in self._begun or "--resume" in start_words or self._run_id() != before:
                    start_words = ["--resume", *began_in]
                else:  # it died before the run, or during a prerequisite
                    begin = [word for word in start_words if word == "--restart"]
                    start_words = [*begin, *began_in]
                from_step = f", from the checkpoint of step {start_words[2]}" if "--from" in start_words[1:2] else ""
                pause_s = self._next_pause_s(now - began) if end.is_its_own else 0.0
                when = f" in {pause_s:g} s" if pause_s else ""
                print(f"the coordinator {end.description}; it is started again{when}{from_step}", flush=True)
                if not self._pause(pause_s):
                    return code if code > 0 else INTERRUPTED
        times = f"; processes were replaced {self._most} times before" if self._most else ""
        print(f"error: the coordinator {end.description}{times} (cluster.max_replacements)", file=sys.stderr)
        if self._begun:
            words = [word for word in self._words if word != f"--unfinished-code={OK}"]
            print(f"continue with: {shlex.join(['coordinator', 'up', *words, '--resume', '--supervise'])}", flush=True)
        return FAILED

    def _describe(self, code: int) -> _End:
        """Describe the end of a coordinator; `code` is its exit code, negative for a signal."""
        if self._silent_s is not None:
            reason = f"no sign of life for {self._silent_s:.0f} s"
            return _End(reason, f"was killed: {reason}")
        if code < 0:
            reason = f"killed by {signal.Signals(-code).name}"
            return _End(reason, f"was {reason}")
        if self._whole is not None:
            reason = "its newest checkpoint is damaged"
            return _End(reason, f"was ended: {reason}")
        return _End(f"exit code {code}", f"has failed with exit code {code}", is_its_own=True)

    def _next_pause_s(self, lived_s: float) -> float:
        """Return the pause after a coordinator that has failed by itself."""
        is_first = lived_s > _LIVED_S or not self._pause_s
        self._pause_s = _PAUSE_S if is_first else min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._pause_s

    def _pause(self, seconds: float) -> bool:
        """Wait; return True, or at once False if the run is asked to end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._asked:
            time.sleep(_LOOK_S)
        return not self._asked

    def _run_once(self, start_words: Sequence[str], reason: str) -> int:
        """Run a coordinator to its end; return its exit code, negative for a signal.

        `reason` is the reason for which the previous one was lost.
        """
        from tandem.common.wire import ThreadStalls
        from tandem.launch.supervision import InitialState, make_socket_pair, say

        ours, theirs = make_socket_pair()
        with ours:
            with theirs, open(os.memfd_create("configurations"), "wb+") as configs:
                configs.write(self._configs)
                configs.seek(0)
                kept_pids = {name: pid for pid, name in self._kept.items()}
                say(ours, InitialState(reason, kept_pids, tuple(self._replaced_at)))
                owner = ["--configs-fd", str(configs.fileno())]
                owner += ["--supervised-by", str(os.getpid()), "--supervision-fd", str(theirs.fileno())]
                # Then `_pass_on` knows of it, and it takes no signal before it knows what to do about one.
                with signals.defer_signals(), signals.block_signals():
                    # In a group of its own: a signal from the terminal then reaches it once, through this process.
                    process = subprocess.Popen(
                        [*self._program, *self._words, *start_words, *owner],
                        process_group=0,
                        pass_fds=[theirs.fileno(), configs.fileno()],
                    )
                    self._pid = process.pid
            self._within_s, self._silent_s, self._is_final = self._start_s, None, False
            self._alive_by = time.monotonic() + self._start_s
            stalls = ThreadStalls()
            while process.pid not in self._ended:
                self._look(ours, stalls)
            self._hear(ours)
        self._pid = None
        code, _ = self._ended.pop(process.pid)
        process.returncode = code  # it was collected elsewhere, so Popen cannot know
        return code

    def _look(self, coordinator: socket.socket, stalls: ThreadStalls) -> None:
        """Wait for the next event."""
        from tandem.launch.supervision import ProcessEnd, say

        wait_to_read(coordinator, _LOOK_S)
        heard_of = time.monotonic()
        self._alive_by += stalls.until(heard_of, _LOOKED_S)
        self._hear(coordinator)
        self._ended = {pid: ended for pid, ended in self._ended.items() if heard_of - ended[1] < _GONE_S}
        for pid, code in _reap():
            self._ended[pid] = code, heard_of
            if self._kept.pop(pid, None) is not None:
                say(coordinator, ProcessEnd(pid, code))
        if heard_of > self._alive_by and self._silent_s is None and self._pid is not None:
            if heard_of - self._alive_by < LONGEST_DISK_WAIT_S and is_waiting_for_disk(self._pid):
                self._spared_until = heard_of + _AFTER_DISK_S
            elif heard_of > self._spared_until:
                self._silent_s = heard_of - self._alive_by + self._within_s
                os.kill(self._pid, signal.SIGKILL)

    def _hear(self, coordinator: socket.socket) -> None:
        """Take the coordinator's messages."""
        from tandem.launch import supervision

        while message := supervision.hear(coordinator):
            report = supervision.to_supervisor.decode(message)
            if isinstance(report, supervision.Alive):
                self._within_s, self._alive_by = report.within_s, time.monotonic() + report.within_s
            elif isinstance(report, supervision.BegunRun):
                self._begun[report.folder] = None
            elif isinstance(report, supervision.Replaced):
                self._replaced_at += [time.monotonic()] * report.count
            elif isinstance(report, supervision.GoBack):
                self._whole = report.step
            elif isinstance(report, supervision.Final):
                self._is_final = True
            elif report.pid in self._ended:
                supervision.say(coordinator, supervision.ProcessEnd(report.pid, self._ended[report.pid][0]))
            else:
                self._kept[report.pid] = report.name

    def _await_the_others(self) -> None:
        """Wait until the children of a dead coordinator are gone, except those that are kept: the kernel ends them."""
        deadline = time.monotonic() + _GONE_S
        while True:
            for pid, _ in _reap():
                self._kept.pop(pid, None)
            kept_pids = {each for pid in self._kept for each in (pid, *list_descendants(pid))}
            orphans = [pid for pid in list_descendants(os.getpid()) if pid not in kept_pids]
            if not orphans:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pass_on(self, number: int) -> None:
        self._asked.append(number)
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _run_id(self) -> str | None:
        """Return the name of the run in the folder; None if there is none."""
        from tandem.observe.run_folder.journal import read_journal

        with contextlib.suppress(RunFolderError), read_journal(self._folder) as journal:
            return journal.run_id
        return None


def _reap() -> list[tuple[int, int]]:
    """Collect the children that have ended, with their exit codes."""
    exits = []
    with contextlib.suppress(ChildProcessError):  # there is no child any more
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            exits.append((ended[0], os.waitstatus_to_exitcode(ended[1])))
    return exits
