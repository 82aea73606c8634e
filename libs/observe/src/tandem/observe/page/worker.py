"""Processes that do for the page what may hang or eat memory: the page's side, and theirs.

Each request and each answer is a length of four bytes, the highest first, and so many bytes. A process ends with its
input, and when nothing has been asked for a while.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tandem.common.descriptors import wait_to_read, wait_to_write
from tandem.common.process_lifetime import is_stopped


class PageWorker:
    """A process that is started for the first request, and again after its end. One thread at a time may use it."""

    def __init__(self, arguments: Sequence[str], most_bytes: int, environment: Mapping[str, str] | None = None) -> None:
        """Start nothing yet; `arguments` are a module and its own, `most_bytes` the limit of an answer."""
        self._arguments = arguments
        self._most_bytes = most_bytes
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.was_stopped = False
        """Whether the last process without an answer was stopped from outside, so that another may give one."""

    def ask(self, request: bytes, deadline: float) -> bytes | None:
        """Return the answer to a request; None if the process fails, or takes longer than until `deadline`.

        The deadline is by the monotonic clock. The process has ended when there is no answer.
        """
        if self._process is not None and self._process.poll() is not None:
            self.end()  # it was idle for long, or the last request was too much for it
        is_new = self._process is None
        process = self._process = self._process or self._start()
        assert process.stdin is not None, "see _start"
        assert process.stdout is not None, "see _start"
        with contextlib.suppress(OSError):  # it has ended
            if _write(process.stdin.fileno(), len(request).to_bytes(4, "big") + request, deadline):
                head = _read(process.stdout.fileno(), 4, deadline)
                size = int.from_bytes(head, "big")
                if len(head) == 4 and size <= self._most_bytes:
                    answer = _read(process.stdout.fileno(), size, deadline)
                    if len(answer) == size:
                        return answer
        self.was_stopped = is_stopped(process.pid)
        self.end()
        # One that ended because it was idle may have done so just now.
        return None if is_new or time.monotonic() > deadline else self.ask(request, deadline)

    def end(self) -> None:
        """End the process."""
        if self._process is None:
            return
        with self._process as process:  # closes its pipes, and waits for it
            process.kill()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-P", "-m", *self._arguments]
        # Libraries of linear algebra would take address space for threads that nothing here needs.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **self._environment}
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, env=environment
        )
        assert process.stdin is not None, "it is a pipe"
        os.set_blocking(process.stdin.fileno(), False)
        return process


def _write(descriptor: int, data: bytes, deadline: float) -> bool:
    """Write bytes; return whether all were taken in time."""
    unwritten = memoryview(data)
    while unwritten:
        if not wait_to_write(descriptor, deadline - time.monotonic()):
            return False
        unwritten = unwritten[os.write(descriptor, unwritten[: 1 << 16]) :]
    return True


def _read(descriptor: int, count: int, deadline: float) -> bytes:
    """Return this many bytes; fewer if the process ends, or in time no more come."""
    parts: list[bytes] = []
    while count and wait_to_read(descriptor, deadline - time.monotonic()):
        part = os.read(descriptor, count)
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# --- the process -----------------------------------------------------------------------------------------------------


def answer_requests(answer: Callable[[bytes], bytes], idle_s: float) -> None:
    """Answer requests until the input ends, or nothing comes for `idle_s`; whatever prints meanwhile is dropped."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the page ends this process by closing its input
    os.nice(10)
    output = os.dup(1)
    os.dup2(2, 1)
    while wait_to_read(0, idle_s):
        head = _read_input(4)
        if len(head) < 4:
            return
        reply = answer(_read_input(int.from_bytes(head, "big")))
        unwritten = memoryview(len(reply).to_bytes(4, "big") + reply)
        while unwritten:
            unwritten = unwritten[os.write(output, unwritten) :]


def _read_input(count: int) -> bytes:
    """Return this many bytes of the input; fewer at its end."""
    parts: list[bytes] = []
    while count and (part := os.read(0, min(count, 2**20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
