"""Handle the signals that ask processes to end, and decide which process acts on them.

`timeout`, Slurm, systemd and a terminal signal all processes of a run at once. The coordinator alone acts on that: it
finishes or abandons the step, saves, and ends what it has launched, which leaves such signals to it. A service that was
started by hand acts on its own: it may be the only one that is asked. So does any rollout that gets SIGTERM: it leaves,
and the run goes on. Where the coordinator was asked as well, that is of no account.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO, cast

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUTS = (1, 2)
ASKED_ONCE_S = 2.0
"""Signals that ask a process to end within so long of each other are one request, unless they are Ctrl-C."""
_STUCK_S = 20.0
"""How long a process that was asked to end may be in a computation or a system call that hears of nothing."""
_raised: list[int] = []
"""The signals for which `KeyboardInterrupt` was raised since `interrupt_when_asked`. In a finalizer, of which imports
run many, Python only prints it and goes on."""


def leave_to_coordinator() -> None:
    """Have this process, and what it forks, go on when it is asked to end.

    SIGTERM has a handler that does nothing. What is ignored stays so in programs that a service starts, an environment
    for example, and those are ended by it.
    """
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _go_on)


def restore() -> None:
    """Have this process end when it is asked to, as a new interpreter does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def interrupt_when_asked() -> None:
    """Have all ways to ask this process to end do what Ctrl-C does: raise `KeyboardInterrupt`, once.

    `timeout` and systemd ask several times, and what is underway to the end is not interrupted again, but by Ctrl-C.
    A process that goes on all the same, because Python has ignored what was raised in a finalizer, is asked again when
    it begins to listen (`heard`).
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        _raised.append(number)
        for each in _heard():
            if each != signal.SIGINT:
                signal.signal(each, _go_on)
        raise KeyboardInterrupt

    _raised.clear()
    for number in _heard():
        signal.signal(number, interrupt)


def end_when_stuck() -> Watch:
    """After such a request, have this process end in any case, also where a collective operation waits for ever."""
    return Watch()


class Watch:
    """Ends this process a while after it was asked to, from a thread of its own."""

    def __init__(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # or a child's signals would count
        self._read = read
        self._requests = _Requests(is_first_for_good=True)
        threading.Thread(target=self._watch, daemon=True, name="signals").start()

    def leave_first(self) -> None:
        """Take the next request for one to leave, after which the process goes on."""
        self._requests = _Requests(is_first_for_good=False)

    def _watch(self) -> None:
        while (number := os.read(self._read, 1)[0]) not in _ENDING or not self._requests.is_for_good(number):
            pass
        time.sleep(_STUCK_S)
        os._exit(128 + number)


class _Requests:
    """Tells requests to leave from those to end at once: the next one, unless it comes with the first."""

    def __init__(self, *, is_first_for_good: bool) -> None:
        self._first_at: float | None = -math.inf if is_first_for_good else None

    def is_for_good(self, number: int) -> bool:
        """Take a request; tell whether the process is to end at once."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            return False
        # `timeout` and systemd ask twice at once; only who presses Ctrl-C again means it.
        return number == signal.SIGINT or now - self._first_at > ASKED_ONCE_S


def leave_when_asked(leave: Callable[[], None], *, is_launched: bool) -> None:
    """Have the first request of this process call `leave`, and the next one raise `KeyboardInterrupt`.

    Of a process that was launched, Ctrl-C and a terminal that closes ask whoever has launched it, and not this one.
    """
    requests = _Requests(is_first_for_good=False)

    def handle(number: int, frame: FrameType | None) -> None:
        if requests.is_for_good(number):
            for each in numbers:
                if each != signal.SIGINT:
                    signal.signal(each, _go_on)
            raise KeyboardInterrupt
        leave()

    numbers = [signal.SIGTERM] if is_launched else _heard()
    for number in numbers:
        signal.signal(number, handle)


@contextlib.contextmanager
def heard(listen: Callable[[int], None]) -> Iterator[None]:
    """Call `listen` with each signal that asks this process to end inside the block, and with one that had no effect.

    When its terminal has closed, what would be printed there goes nowhere from then on.
    """
    terminals = [descriptor for descriptor in _OUTPUTS if os.isatty(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence(terminals)
        listen(number)

    former = {number: signal.signal(number, handle) for number in _heard()}
    streams = sys.stdout, sys.stderr
    if terminals:
        sys.stdout, sys.stderr = (cast(TextIO, _Terminal(stream, terminals)) for stream in streams)
    try:
        if _raised:
            handle(_raised.pop(), None)
            _raised.clear()
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for number, handler in former.items():
            signal.signal(number, handler)


class _Terminal:
    """A stream to a terminal that may close: what is written goes nowhere from then on.

    The signal that says so may come after the first write that fails.
    """

    def __init__(self, stream: TextIO, terminals: list[int]) -> None:
        self._stream = stream
        self._terminals = terminals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        with self._forgiving():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is kept."""
        with self._forgiving():
            self._stream.flush()

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _silence(self._terminals)


def _heard() -> list[signal.Signals]:
    """Return the signals that are not ignored since before this process began, as `nohup` has it with SIGHUP."""
    return [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]


def _go_on(number: int, frame: FrameType | None) -> None:
    pass


def _silence(descriptors: list[int]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
