"""A waker: what ends a thread's wait for messages, from any other thread."""

from __future__ import annotations

import contextlib
import os
import threading


class Waker:
    """A file descriptor that is ready to be read once it was woken, until it is cleared."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, as pollers ask for it; -1 once it is closed."""
        return self._fd

    def wake(self) -> None:
        """End the wait, or the next one; from any thread, and after `close` without effect."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Take back what has woken it, if anything has."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
