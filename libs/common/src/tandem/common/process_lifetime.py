"""Have the kernel end a process together with its parent and its descendants; imports very little."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
WATCH = b"w"
"""Tells a guardian to end what its owner started, too; see `fork_guarded`."""
_STARTED_BY = "TANDEM_STARTED_BY"
"""Environment variable with the id and start time of a process, for what it starts."""
TRACE = b"t"
"""Tells a guardian to have its child print its stack (SIGUSR1, if handled) and then to end it."""
_SAYING_S = 0.5
"""How long a child may take to print its stack."""
_ENDED_S = 5.0
"""How long the kernel may take to end killed processes."""
_WAKING = (signal.SIGCHLD, signal.SIGTERM, signal.SIGCONT)
"""Signals that have a guardian look at its child and its owner."""
_EXITING = 0x4
"""Flag of a thread that has begun to exit: ``PF_EXITING`` in the kernel's ``include/linux/sched.h``."""
_SOON_S = 0.05
_LOOK_S = 1.0
"""How often a guardian lists its owner's descendants."""


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, even by kill -9."""
    _request_death_signal(parent_pid, signal.SIGKILL)


@contextlib.contextmanager
def reaper() -> Iterator[None]:
    """Adopt descendants orphaned inside the block."""
    adopt_orphans()
    try:
        yield
    finally:
        _call_prctl(_PR_SET_CHILD_SUBREAPER, 0)


def adopt_orphans() -> None:
    """Adopt orphaned descendants, so that none escapes, daemons included."""
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def be_named_by_descendants() -> None:
    """Have what this process starts name it in its environment, where a guardian that watches finds it."""
    os.environ[_STARTED_BY] = _read_name(os.getpid())


def name_this_process() -> dict[str, str]:
    """Return an environment that names this process, for one that it starts."""
    return {**os.environ, _STARTED_BY: _read_name(os.getpid())}


def list_descendants(pid: int) -> list[int]:
    """Return the descendants of a process, parents before children."""
    children: dict[int, list[int]] = defaultdict(list)
    for child in filter(str.isdigit, os.listdir("/proc")):
        if (status := _read_status(int(child))) is not None:
            children[status.parent].append(int(child))
    pids = [pid]
    for parent in pids:
        pids += children.pop(parent, [])
    return pids[1:]


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped by a signal, or by a debugger."""
    return (status := _read_status(pid)) is not None and status.state in ("T", "t")


def count_processor_seconds(pid: int) -> float:
    """Return the seconds that processors have worked for a process; 0 if it has ended."""
    status = _read_status(pid)
    return 0.0 if status is None else status.ticks / os.sysconf("SC_CLK_TCK")


def continue_stopped(pid: int) -> None:
    """Continue a process if a signal has stopped it, so that it can end.

    A stop that was sent and has not yet been obeyed cannot be seen; the kernel drops it for this one.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGCONT)


def end_descendants() -> None:
    """Kill all descendants of this process, which adopts orphans, until none is left; give up after `_ENDED_S`."""
    deadline = time.monotonic() + _ENDED_S
    while _reap().has_children and time.monotonic() < deadline:
        for pid in list_descendants(os.getpid()):
            _kill(pid)
        time.sleep(0.001)


def fork_guarded(lifeline: int, owner: int) -> None:
    """Fork: return in the child; this process guards the child from now on and ends with it.

    The guardian ends when the child does, when the other end of `lifeline` is closed, or when its parent ends in any
    way. It then kills all of its descendants: children, their children, and daemons among them. If the child ended
    by itself, it writes the exit code to `lifeline`. After receiving `WATCH` there, it also kills what its owner has
    started, once the owner is dead: what it saw below the owner, and what names the owner in its environment
    (`be_named_by_descendants`). It does the same for a dead process that it names in its own environment, if its owner
    was killed as well.

    Args:
        lifeline: descriptor of one end of a stream socket; the owner holds the other.
        owner: this process's parent.
    """
    adopt_orphans()
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in _WAKING:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    _request_death_signal(owner, signal.SIGCONT)  # which also reaches a guardian that is stopped
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in _WAKING:
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (woken, wakes, lifeline):
            os.close(descriptor)
        die_with(guardian)
        return
    try:
        _close_all_but(0, 1, 2, lifeline, woken, wakes)
        _guard(child, owner, lifeline, woken)
    finally:
        os._exit(0)


def _guard(child: int, owner: int, lifeline: int, woken: int) -> None:
    """Wait until the child, the owner or the lifeline ends, and end the others."""
    poll = select.poll()
    for descriptor in (lifeline, woken):
        poll.register(descriptor, select.POLLIN)
    of_owner: dict[int, str] = {}
    code, watches, name = None, False, _read_name(owner)
    while os.getppid() == owner and code is None:
        if lifeline in dict(poll.poll(_LOOK_S * 1000 if watches else None)):
            if (word := _read(lifeline)) != WATCH:
                if word == TRACE:
                    os.kill(child, signal.SIGUSR1)
                    time.sleep(_SAYING_S)
                break
            watches = True
        _read(woken)
        code = _reap().codes.get(child)
        if watches:
            seen = {pid: status.began for pid in list_descendants(owner) if (status := _read_status(pid)) is not None}
            # While a process exits, its threads lose the children that they started, one thread after the other.
            if os.getppid() == owner and not _is_exiting(owner):
                of_owner = seen
    if code is not None:
        with contextlib.suppress(OSError):
            os.write(lifeline, str(code).encode())
    end_descendants()
    if watches and _is_orphaned_by(owner):
        _end_former(of_owner)
        _end_started_by(name)
    elif os.getppid() != owner:
        _end_of_dead_starter()


def _end_of_dead_starter() -> None:
    """Kill what the process has started that this one names, if that is dead, too, or dies within `_ENDED_S`.

    Guardians between the two may have been killed with it, which would have ended what they started themselves.
    """
    name = os.environ.get(_STARTED_BY, "")
    pid = name.partition("-")[0]
    if not pid.isdecimal():
        return
    deadline = time.monotonic() + _ENDED_S
    while _read_name(int(pid)) == name and not _is_exiting(int(pid)):
        if time.monotonic() > deadline:
            return
        time.sleep(_SOON_S)
    _end_started_by(name)


def _end_former(children: dict[int, str]) -> None:
    """Kill the former descendants of a dead process; the start time of each guards against reused ids."""
    for pid, began in children.items():
        if pid != os.getpid() and (status := _read_status(pid)) is not None and status.began == began:
            for victim in (pid, *list_descendants(pid)):
                _kill(victim)


def _end_started_by(name: str) -> None:
    """Kill the processes that name this one in their environment, until none is left; give up after `_ENDED_S`.

    They may have been started since its descendants were last listed.
    """
    deadline = time.monotonic() + _ENDED_S
    while (pids := _list_started_by(name)) and time.monotonic() < deadline:
        for pid in pids:
            _kill(pid)
        time.sleep(0.001)


def _list_started_by(name: str) -> list[int]:
    pids, variable = [], f"{_STARTED_BY}={name}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if variable in file.read().split(b"\0") and pid != os.getpid():
                pids.append(pid)
    return pids


def _read_name(pid: int) -> str:
    """Return what no other process has: the id and the start time."""
    return f"{pid}-{status.began}" if (status := _read_status(pid)) is not None else f"{pid}-ended"


def _read(descriptor: int) -> bytes:
    """Return the bytes available; empty at the end of the stream or if there are none."""
    with contextlib.suppress(OSError):
        return os.read(descriptor, 1 << 12)
    return b""


def _is_orphaned_by(owner: int) -> bool:
    """Tell whether the parent is dead; if the kernel has closed its files, it is exiting and dies in a moment."""
    deadline = time.monotonic() + _ENDED_S
    while os.getppid() == owner and _is_exiting(owner) and time.monotonic() < deadline:
        time.sleep(0.005)
    return os.getppid() != owner


def _is_exiting(pid: int) -> bool:
    """Tell whether a process is gone, or its first thread exits; before that, no thread of it loses a child."""
    return (status := _read_status(pid)) is None or bool(status.flags & _EXITING)


def _close_all_but(*descriptors: int) -> None:
    for low, high in itertools.pairwise([*sorted(descriptors), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)


class _Reaped(NamedTuple):
    codes: dict[int, int]
    has_children: bool


def _reap() -> _Reaped:
    """Collect the children that have ended, and tell whether others remain."""
    codes: dict[int, int] = {}
    try:
        while (pid := os.waitpid(-1, os.WNOHANG))[0]:
            codes[pid[0]] = os.waitstatus_to_exitcode(pid[1])
    except ChildProcessError:
        return _Reaped(codes, has_children=False)
    return _Reaped(codes, has_children=True)


class _Status(NamedTuple):
    state: str
    parent: int
    flags: int
    ticks: int
    began: str


def _read_status(pid: int) -> _Status | None:
    """Return what ``/proc/PID/stat`` says of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Status(
        state=fields[0].decode(),
        parent=int(fields[1]),
        flags=int(fields[6]),
        ticks=int(fields[11]) + int(fields[12]),
        began=fields[19].decode(),
    )


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _request_death_signal(parent_pid: int, number: signal.Signals) -> None:
    _call_prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)


def _call_prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
