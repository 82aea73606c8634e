"""Termination signals: how to handle them, and which process acts on them.

`timeout`, Slurm, systemd and a terminal signal all processes of a run at once. Only the coordinator acts on that: it
finishes or abandons the step, saves, and ends the processes that it launched, which ignore such signals. A service
started by hand acts on its own, since it may be the only process signalled. So does any rollout that gets SIGTERM:
it leaves, and the run goes on. If the coordinator was signalled too, that makes no difference.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from tandem.common import outputs

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ASKED_ONCE_S = 2.0
"""Termination signals that arrive within this time are one request, unless they are Ctrl-C."""
_STUCK_S = 20.0
"""How long a process told to end may be stuck in a computation or a system call that no signal interrupts."""
_raised: list[int] = []
"""Signals for which `KeyboardInterrupt` was raised since `interrupt_when_asked`. In a finalizer, which imports often
run, Python only prints the exception and goes on."""


def leave_to_coordinator() -> None:
    """Have this process and its forked children ignore termination signals.

    SIGTERM gets a handler that does nothing. An ignored signal would stay ignored in the programs that a service
    starts, such as an environment, and SIGTERM is what ends those.
    """
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _go_on)


def restore() -> None:
    """Restore the default termination signals, as in a new interpreter."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def interrupt_when_asked() -> None:
    """Have every termination signal do what Ctrl-C does: raise `KeyboardInterrupt`, once. Unblock those blocked.

    `timeout` and systemd signal several times; only Ctrl-C interrupts the shutdown once it has begun. Python ignores
    exceptions in a finalizer, so the process may go on all the same. It is then told again when it begins to listen
    (`hear_signals`), whether or not this function is called once more before.
    """
    if not any(signal.getsignal(number) is _interrupt for number in _ENDING):
        _raised.clear()
    for number in _list_heard():
        signal.signal(number, _interrupt)
    unblock_signals()


def _interrupt(number: int, frame: FrameType | None) -> None:
    _raised.append(number)
    for heard_number in _list_heard():
        if heard_number != signal.SIGINT:
            signal.signal(heard_number, _go_on)
    raise KeyboardInterrupt


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block termination signals inside the block, in this thread and in what it starts: they wait.

    A program that is started so is signalled when it calls `unblock_signals` or `interrupt_when_asked`, however early
    the signal comes. While it imports, `KeyboardInterrupt` would be a traceback, or would be lost in a finalizer.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    """Have termination signals that were blocked when this process began, or since, take effect."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def end_when_stuck() -> TerminationWatch:
    """Force this process to end after such a request, even if a collective operation blocks for ever."""
    return TerminationWatch()


class TerminationWatch:
    """A thread that ends this process some time after a termination signal."""

    def __init__(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # or a child's signals would count here
        self._read = read
        self._requests = _Requests(is_first_for_good=True)
        threading.Thread(target=self._watch, daemon=True, name="signals").start()

    def leave_first(self) -> None:
        """Treat the next signal as a request to leave, after which the process goes on."""
        self._requests = _Requests(is_first_for_good=False)

    def _watch(self) -> None:
        while (number := os.read(self._read, 1)[0]) not in _ENDING or not self._requests.is_for_good(number):
            pass
        time.sleep(_STUCK_S)
        os._exit(128 + number)


class _Requests:
    """The requests to this process: the first is to leave, the next to end at once unless both come together."""

    def __init__(self, *, is_first_for_good: bool) -> None:
        self._first_at: float | None = -math.inf if is_first_for_good else None

    def is_for_good(self, number: int) -> bool:
        """Register a request; tell whether the process is to end at once."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            return False
        # `timeout` and systemd signal twice in a row; only a second Ctrl-C is meant as a second request.
        return number == signal.SIGINT or now - self._first_at > ASKED_ONCE_S


def leave_when_asked(leave: Callable[[], None], *, is_launched: bool) -> None:
    """Have the first termination signal call `leave`, and the next one raise `KeyboardInterrupt`.

    In a launched process, Ctrl-C and a closing terminal are for its parent, and are not handled here.
    """
    requests = _Requests(is_first_for_good=False)

    def handle(number: int, frame: FrameType | None) -> None:
        if requests.is_for_good(number):
            for handled_number in numbers:
                if handled_number != signal.SIGINT:
                    signal.signal(handled_number, _go_on)
            raise KeyboardInterrupt
        leave()

    numbers = [signal.SIGTERM] if is_launched else _list_heard()
    for number in numbers:
        signal.signal(number, handle)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Have termination signals take effect at the end of the block. For the main thread.

    To block them would not do: then another thread takes them, and Python interrupts the main thread all the same.
    """
    deferred: list[int] = []
    before = {number: signal.signal(number, lambda number, _: deferred.append(number)) for number in _list_heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for deferred_number in deferred:
            signal.raise_signal(deferred_number)


@contextlib.contextmanager
def hear_signals(listen: Callable[[int], None]) -> Iterator[None]:
    """Call `listen` with each termination signal inside the block, and with an earlier one that had no effect.

    Once the terminal has closed, output to it is discarded.
    """
    terminals = outputs.terminals()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            outputs.discard(terminals)
        listen(number)

    former = {number: signal.signal(number, handle) for number in _list_heard()}
    try:
        with outputs.outlast_readers():  # the signal may come after the first write that fails
            if _raised:
                handle(_raised.pop(), None)
                _raised.clear()
            yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _list_heard() -> list[signal.Signals]:
    """Return the termination signals that were not ignored at startup; `nohup`, for example, ignores SIGHUP."""
    return [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]


def _go_on(number: int, frame: FrameType | None) -> None:
    pass
