"""Handle the signals that ask processes to end, and decide which process acts on them.

`timeout`, Slurm, systemd and a terminal signal all processes of a run at once. The coordinator alone acts on that: it
finishes or abandons the step, saves, and ends what it has launched, which leaves such signals to it. A service that was
started by hand acts on its own: it may be the only one that is asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUTS = (1, 2)
_STUCK_S = 20.0
"""How long a process that was asked to end may be in a computation or a system call that hears of nothing."""


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
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _heard():
            if each != signal.SIGINT:
                signal.signal(each, _go_on)
        raise KeyboardInterrupt

    for number in _heard():
        signal.signal(number, interrupt)


def end_when_stuck() -> None:
    """After such a request, have this process end in any case, also where a collective operation waits for ever."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # or a child's signals would count

    def watch() -> None:
        while (number := os.read(read, 1)[0]) not in _ENDING:
            pass
        time.sleep(_STUCK_S)
        os._exit(128 + number)

    threading.Thread(target=watch, daemon=True, name="signals").start()


@contextlib.contextmanager
def heard(listen: Callable[[int], None]) -> Iterator[None]:
    """Call `listen` with each signal that asks this process to end inside the block.

    When its terminal has closed, what would be printed there goes nowhere from then on.
    """
    terminals = [descriptor for descriptor in _OUTPUTS if os.isatty(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence(terminals)
        listen(number)

    former = {number: signal.signal(number, handle) for number in _heard()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


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
