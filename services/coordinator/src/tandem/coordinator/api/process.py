"""The process of a run, as seen by the program that began it, and the messages between the two.

One thread (`RunProcess._watch`) starts the process and waits for its end. It consumes the process's reports and console
output; it produces the log and the outcome. The guardian's life is tied to this thread, too: the kernel signals a
process when the thread that started it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread as _executors  # noqa: F401 - registers what it does at exit before we do
from pathlib import Path
from typing import IO, Literal

import msgspec

from tandem.common import errors, messages, texts
from tandem.common.descriptors import wait_to_read
from tandem.common.errors import ConfigError, DamagedCheckpoint, ServiceError, ServiceLost, TandemError

Mode = Literal["new", "resume", "restart"]
_KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TandemError)}


class RunOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Request to carry out a run."""

    source: str
    """File or name that the configuration was read from."""
    config_json: bytes
    mode: Mode
    from_step: int | None
    reward_server: messages.RewardServer | None


class RunChecked(msgspec.Struct, frozen=True, tag=True):
    """Report that the run was checked, and nothing is wrong with it."""


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report that the run is over."""

    outcome: Literal["finished", "interrupted", "failed"]
    kind: str = ""
    """Class of the error, if it is one of Tandem's."""
    what: tuple[str, ...] = ()
    """Arguments of that class."""
    whole: int | None = None
    """`DamagedCheckpoint.whole_step` of the error."""


Report = RunChecked | RunEnded


def failure(error: BaseException) -> RunEnded:
    """Describe the error that ended a run."""
    kind = type(error).__name__
    match error:
        case ConfigError():
            return RunEnded(outcome="failed", kind=kind, what=error.problems)
        case ServiceError():
            return RunEnded(outcome="failed", kind=kind, what=(error.process, error.phase, error.what))
        case DamagedCheckpoint():
            return RunEnded(outcome="failed", kind=kind, what=(str(error),), whole=error.whole_step)
        case TandemError():
            return RunEnded(outcome="failed", kind=kind, what=(str(error),))
        case _:  # a bug: the log has the traceback
            return RunEnded(outcome="failed", what=(f"{kind}: {error}",))


def error_of(ended: RunEnded) -> TandemError | None:
    """Return the error that ended a run, None if it did not fail."""
    if ended.outcome != "failed":
        return None
    kind = _KINDS.get(ended.kind, TandemError)
    try:
        error = kind(*ended.what)
    except TypeError:  # a class that takes other arguments
        return TandemError(" ".join(ended.what))
    if isinstance(error, DamagedCheckpoint):
        error.whole_step = ended.whole
    return error


LOG = "logs/console.log"
"""Console output of the run, within the run folder."""
_LOOK_S = 0.1
_TAIL_LINES = 3
_reports = msgspec.json.Decoder(Report)
_alive: set[RunProcess] = set()


class RunProcess:
    """A run that goes on beside this program."""

    def __init__(self, order: RunOrder, folder: Path, *, show: bool, at_end: Callable[[], None]) -> None:
        """Start the process; `at_end` is called when it has ended, for whatever reason."""
        self._order = order
        self._folder = folder
        self._show = show
        self._at_end = at_end
        self.started_at = time.time()
        self._console: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the thread
        self._num_shown = 0
        self._num_logged = 0
        self._lifeline, self._guarded = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._has_started = threading.Event()
        self._asked_to_stop = False
        self._lock = threading.Lock()
        self.has_begun = threading.Event()
        """Set when the run was checked, or has ended before that."""
        self.has_ended = threading.Event()
        self.outcome: RunEnded | None = None
        self._ends_with_the_program()
        self._thread = threading.Thread(target=self._watch, name="tandem-run", daemon=True)
        self._thread.start()
        self._has_started.wait()

    @property
    def error(self) -> TandemError | None:
        """Error that ended the run, if it failed."""
        return None if self.outcome is None else error_of(self.outcome)

    def stop(self) -> None:
        """Ask the run once to save and end; do not wait."""
        with self._lock:
            process = self._process
            if self._asked_to_stop or process is None or self.has_ended.is_set() or process.poll() is not None:
                return
            self._asked_to_stop = True
            # Signal all of its processes, as a terminal does; only the coordinator acts on it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all of its processes at once; files on disk stay."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the end; return False on timeout."""
        return self.has_ended.wait(timeout_s)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            reports = self._start()
            self._hear(reports)
            code = self._exit_code()
            if self.outcome is None and self._asked_to_stop and code == -signal.SIGTERM:
                self.outcome = RunEnded(outcome="interrupted")  # before it could listen to signals
            elif self.outcome is None:
                self.outcome = RunEnded(outcome="failed", kind=ServiceLost.__name__, what=self._describe_loss(code))
        except BaseException as error:
            arguments = (f"the run could not be started: {type(error).__name__}: {error}",)
            self.outcome = RunEnded(outcome="failed", kind=TandemError.__name__, what=arguments)
        finally:
            for file in (self._lifeline, self._guarded, self._console):
                file.close()
            try:
                self._at_end()
            finally:
                _alive.discard(self)
                self._has_started.set()
                self.has_begun.set()
                self.has_ended.set()

    def _start(self) -> int:
        """Start the process; return the descriptor of its reports."""
        reports, theirs = os.pipe()
        order = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        with order, self._guarded, open(theirs, "wb"):
            order.write(msgspec.json.encode(self._order))
            order.flush()
            order.seek(0)
            descriptors = (self._guarded.fileno(), order.fileno(), theirs)
            words = [sys.executable, "-m", f"{__package__}.child", *map(str, descriptors), str(os.getpid())]
            process = subprocess.Popen(
                words,
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=self._console,
                stderr=self._console,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for this program: an interrupted cell does not end the run
            )
        self._process = process
        self._has_started.set()
        return reports

    def _hear(self, reports: int) -> None:
        """Take reports until the other end is closed, and pass on the console output meanwhile."""
        partial_line = b""
        with open(reports, "rb", buffering=0) as file:
            while True:
                is_there = wait_to_read(file, _LOOK_S)
                self._pass_on()
                if is_there:
                    if not (chunk := file.read(1 << 16)):
                        return
                    *lines, partial_line = (partial_line + chunk).split(b"\n")
                    for line in lines:
                        self._take(_reports.decode(line))

    def _take(self, report: Report) -> None:
        if isinstance(report, RunChecked):
            self.has_begun.set()
        else:
            self.outcome = report

    def _exit_code(self) -> int | None:
        """Wait for the guardian, which has ended everything by then; return the exit code of the run's process."""
        assert self._process is not None
        while self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)
            self._pass_on()
        self._pass_on()
        self._lifeline.setblocking(False)
        with contextlib.suppress(OSError, ValueError):
            return int(self._lifeline.recv(16))
        return None

    def _pass_on(self) -> None:
        """Write the run's new console output to its log, and show it."""
        size = os.fstat(self._console.fileno()).st_size
        if self._show and size > self._num_shown:
            text = os.pread(self._console.fileno(), size - self._num_shown, self._num_shown)
            self._num_shown = size
            sys.stdout.write(text.decode(errors="replace"))
            sys.stdout.flush()
        log = self._folder / LOG
        if self.has_begun.is_set() and size > self._num_logged and log.parent.is_dir():
            with contextlib.suppress(OSError), log.open("ab") as file:  # the disk may be full
                file.write(os.pread(self._console.fileno(), size - self._num_logged, self._num_logged))
                self._num_logged = size

    def _describe_loss(self, code: int | None) -> tuple[str, str, str]:
        size = os.fstat(self._console.fileno()).st_size
        start = max(0, size - messages.MAX_TEXT)
        output = os.pread(self._console.fileno(), size - start, start).decode(errors="replace")
        ending = (
            "was killed" if code is None else f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
        )
        return (
            "the run's coordinator",
            "running",
            f"{ending}; it said last: {' | '.join(texts.read_last(output, _TAIL_LINES)) or 'nothing'}",
        )

    def _ends_with_the_program(self) -> None:
        if not _alive:
            _register_exit()
        _alive.add(self)


def _environment() -> dict[str, str]:
    """Return this process's environment, extended so that the run can import whatever this program can import."""
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), os.path.abspath(sys.path[0] or ".")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


_registered = False


def _register_exit() -> None:
    global _registered
    if not _registered:
        _registered = True
        # Before executors are shut down, which reward functions may use: atexit would come after that.
        threading._register_atexit(_await_all)  # type: ignore[attr-defined]


def _await_all() -> None:
    """Wait for runs that still go on when the program reaches its end; if it failed, make them save and end."""
    is_unhappy = hasattr(sys, "last_value") or hasattr(sys, "ps1") or "ipykernel" in sys.modules
    for process in [*_alive]:
        if is_unhappy:
            process.stop()
        try:
            process.join(None)
        except KeyboardInterrupt:
            process.stop()
            process.join(None)
