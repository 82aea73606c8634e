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
_TREE = "TANDEM_TREE"
"""Environment variable that all processes below one guardian have in common, and no others."""
_trees = itertools.count()
TRACE = b"t"
"""Tells a guardian to have its child print its stack (SIGUSR1, if handled) and then to end it."""
_SAYING_S = 0.5
"""How long a child may take to print its stack."""
_ENDED_S = 5.0
"""How long the kernel may take to end killed processes."""
LONGEST_DISK_WAIT_S = 300.0
"""How long a process that waits for a disk counts as alive: nothing waits for ever."""
_WAKING = (signal.SIGCHLD, signal.SIGTERM, signal.SIGCONT)
"""Signals that have a guardian look at its child and its owner."""
_EXITING = 0x4
"""Flag of a thread that has begun to exit: ``PF_EXITING`` in the kernel's ``include/linux/sched.h``."""
_SOON_S = 0.05
_LOOK_S = 1.0
"""How often a guardian lists its owner's descendants."""
_SWEEPER_LOOK_S = 5.0
"""How often a sweeper does, and its guardian's: few processes need it, those that forget their environment."""


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
    """Return an environment that names this process, for a guardian that it starts, and all below that."""
    name = _read_name(os.getpid())
    # Or a title would be written over the environment, in which what only forks is found.
    return {**os.environ, _STARTED_BY: name, _TREE: f"{name}-{next(_trees)}", "SPT_NOENV": "1"}


def copy_names() -> dict[str, str]:
    """Return the variables that name what has started this process, for a program with an environment of its own."""
    return {name: os.environ[name] for name in (_STARTED_BY, _TREE) if name in os.environ}


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


def is_waiting_for_disk(pid: int) -> bool:
    """Tell whether a process or a thread waits for a disk, or for another device, and can do nothing else."""
    return (status := _read_status(pid)) is not None and status.state == "D"


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

    A guardian whose environment names its owner (`name_this_process`) has a sweeper: a process in a session of its own,
    with nothing to do until the guardian is killed. It then ends what was below that, daemons included, also where the
    owner and all other guardians were killed at the same instant.

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
        _guard(child, owner, lifeline, woken, has_sweeper=os.environ.get(_STARTED_BY) == _read_name(owner))
    finally:
        os._exit(0)


def _guard(child: int, owner: int, lifeline: int, woken: int, *, has_sweeper: bool) -> None:
    """Wait until the child, the owner or the lifeline ends, and end the others."""
    poll = select.poll()
    for descriptor in (lifeline, woken):
        poll.register(descriptor, select.POLLIN)
    of_owner: dict[int, str] = {}
    code, watches, name = None, False, _read_name(owner)
    sweeper = _fork_sweeper(owner, watches=False) if has_sweeper else None
    while os.getppid() == owner and code is None:
        if lifeline in dict(poll.poll(_LOOK_S * 1000 if watches else None)):
            if (word := _read(lifeline)) != WATCH:
                if word == TRACE:
                    os.kill(child, signal.SIGUSR1)
                    time.sleep(_SAYING_S)
                break
            watches = True
            if sweeper is not None:
                _kill(sweeper)  # another takes its place
        _read(woken)
        codes = _reap().codes
        code = codes.get(child)
        if sweeper in codes and code is None:
            time.sleep(_SOON_S)
            sweeper = _fork_sweeper(owner, watches=watches)
        if watches:
            seen = _list_with_beginnings(owner)
            # While a process exits, its threads lose the children that they started, one thread after the other.
            if os.getppid() == owner and not _is_exiting(owner):
                of_owner = seen
    if code is not None:
        with contextlib.suppress(OSError):
            os.write(lifeline, str(code).encode())
    end_descendants()
    if watches and _is_orphaned_by(owner):
        _end_former(of_owner)
        _end_marked(_STARTED_BY, name)
    elif os.getppid() != owner:
        _end_of_dead_starter()


def _fork_sweeper(owner: int, *, watches: bool) -> int | None:
    """Fork the sweeper of this process, which is a guardian; return its process id, or None if that is impossible."""
    guardian = os.getpid()
    try:
        pid = os.fork()
    except OSError:  # processes or memory are short: the guardian does without
        return None
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        _close_all_but(0, 1, 2)
        os.setsid()  # what kills the group of its guardian must not kill this
        _sweep_after(guardian, owner, watches=watches)
    finally:
        os._exit(0)


def _sweep_after(guardian: int, owner: int, *, watches: bool) -> None:
    """Wait until a guardian is killed, then end what was below it; if it has watched, all that its owner has started.

    A guardian that ends in any other way has ended this process before.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    of_guardian, of_owner = dict[int, str](), dict[int, str]()
    while os.getppid() == guardian:
        of_guardian = _keep_running(of_guardian) | _list_with_beginnings(guardian)
        if watches and not _is_exiting(owner):
            of_owner = _keep_running(of_owner) | _list_with_beginnings(owner)
        signal.sigtimedwait(_WAKING, _SWEEPER_LOOK_S)
    _end_former(of_guardian)
    if tree := os.environ.get(_TREE):
        _end_marked(_TREE, tree)
    if watches and _end_of_dead_starter():
        _end_former(of_owner)


def _keep_running(processes: dict[int, str]) -> dict[int, str]:
    """Return those that have not ended, by their ids and start times."""
    running = ((pid, began, _read_status(pid)) for pid, began in processes.items())
    return {pid: began for pid, began, status in running if status is not None and status.began == began}


def _list_with_beginnings(pid: int) -> dict[int, str]:
    """Return the descendants of a process, with their start times."""
    return {each: status.began for each in list_descendants(pid) if (status := _read_status(each)) is not None}


def _end_of_dead_starter() -> bool:
    """Kill what the process has started that this one names, if that is dead, too, or dies within `_ENDED_S`.

    Return whether it is dead. Guardians between the two may have been killed with it, which would have ended what they
    started themselves.
    """
    name = os.environ.get(_STARTED_BY, "")
    pid = name.partition("-")[0]
    if not pid.isdecimal():
        return False
    deadline = time.monotonic() + _ENDED_S
    while _read_name(int(pid)) == name and not _is_exiting(int(pid)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_SOON_S)
    _end_marked(_STARTED_BY, name)
    return True


def _end_former(children: dict[int, str]) -> None:
    """Kill the former descendants of a dead process; the start time of each guards against reused ids."""
    for pid, began in children.items():
        if pid != os.getpid() and (status := _read_status(pid)) is not None and status.began == began:
            for victim in (pid, *list_descendants(pid)):
                _kill(victim)


def _end_marked(variable: str, value: str) -> None:
    """Kill the processes with a variable in their environment, until none is left; give up after `_ENDED_S`.

    They may have been started since descendants were last listed. Guardians among them die with what they guard, which
    may have another environment.
    """
    deadline = time.monotonic() + _ENDED_S
    while (pids := _list_marked(variable, value)) and time.monotonic() < deadline:
        victims = {*pids, *(descendant for pid in pids for descendant in list_descendants(pid))}
        for victim in victims - {os.getpid()}:
            _kill(victim)
        time.sleep(0.001)


def _list_marked(variable: str, value: str) -> list[int]:
    pids, line = [], f"{variable}={value}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if line in file.read().split(b"\0") and pid != os.getpid():
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
    """Return what ``/proc/PID/stat`` says of a process or a thread; None if it has ended."""
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
