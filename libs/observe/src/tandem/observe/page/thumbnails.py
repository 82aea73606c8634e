"""Thumbnails of a run's images, made by a process of their own.

A picture that hangs or eats memory ends only that process. Nothing here imports PIL, and the process is started for the
first picture that is asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from tandem.common.errors import DataError
from tandem.samples.images.bounded import Bounded
from tandem.samples.images.store import ImageFolder

FOLDER = "images"
"""Folder of a run's images within its own."""
MOST_BYTES = 1 << 18
"""Most bytes of a thumbnail; one of 96 × 96 pixels has a tenth of that."""
_WORKER = "tandem.observe.page.thumbnail_worker"
_DEADLINE_S = 15.0
"""Seconds for a picture, the start of the process included."""
_MOST_HELD = 1 << 24
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Thumbnails:
    """The thumbnails of images by digest. Threads may share it."""

    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        """Start nothing yet; `deadline_s` is what a picture may take."""
        self._deadline_s = deadline_s
        self._made: Bounded[bytes] = Bounded(lambda made: len(made) + 64, _MOST_HELD)
        """Thumbnails by digest; empty for pictures that cannot be shown."""
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def of(self, run: Path, digest: str) -> bytes:
        """Return the thumbnail of an image of a run as PNG.

        Raises `DataError` if the run has no such image, if it cannot be decoded, or takes too long.
        """
        if not _DIGEST.fullmatch(digest):
            raise DataError("an image's name is its SHA-256: 64 hexadecimal digits")
        images = ImageFolder(run / FOLDER)
        if not images.has(digest):
            raise DataError(f"the run has no image {digest[:12]}")
        made = self._made.find(digest)
        if made is None:
            data = images.get(digest)
            if not self._lock.acquire(timeout=2 * self._deadline_s):
                raise DataError("other pictures take too long: ask again later")
            try:
                made = self._made.find(digest)
                if made is None:
                    made = self._ask(data)
                    self._made.put(digest, made)
            finally:
                self._lock.release()
        if not made:
            raise DataError(f"image {digest[:12]} cannot be shown: it is damaged, too large, or takes too long")
        return made

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, data: bytes) -> bytes:
        """Return what the process makes of an image; nothing if it fails, or takes longer than the deadline."""
        deadline = time.monotonic() + self._deadline_s
        if self._worker is not None and self._worker.poll() is not None:
            self._end()  # it was idle for long, or the last picture was too much for it
        is_new = self._worker is None
        worker = self._worker = self._worker or _start()
        assert worker.stdin is not None, "see _start"
        assert worker.stdout is not None, "see _start"
        made: bytes | None = None
        with contextlib.suppress(OSError):  # it has ended
            if _write(worker.stdin.fileno(), len(data).to_bytes(4, "big") + data, deadline):
                head = _read(worker.stdout.fileno(), 4, deadline)
                size = int.from_bytes(head, "big")
                if len(head) == 4 and size <= MOST_BYTES:
                    made = _read(worker.stdout.fileno(), size, deadline)
                    made = made if len(made) == size else None
        if made is not None:
            return made
        self._end()
        # One that ended because it was idle may have done so just now.
        return b"" if is_new or time.monotonic() > deadline else self._ask(data)

    def _end(self) -> None:
        if self._worker is None:
            return
        with self._worker as worker:  # closes its pipes, and waits for it
            worker.kill()
        self._worker = None


def _start() -> subprocess.Popen[bytes]:
    words = [sys.executable, "-P", "-m", _WORKER]
    # Libraries of linear algebra would take address space for threads that nothing here needs.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, env=environment
    )
    assert worker.stdin is not None, "it is a pipe"
    os.set_blocking(worker.stdin.fileno(), False)
    return worker


def _write(descriptor: int, data: bytes, deadline: float) -> bool:
    """Write bytes; return whether all were taken in time."""
    rest = memoryview(data)
    while rest:
        if not select.select([], [descriptor], [], max(0.0, deadline - time.monotonic()))[1]:
            return False
        rest = rest[os.write(descriptor, rest[: 1 << 16]) :]
    return True


def _read(descriptor: int, count: int, deadline: float) -> bytes:
    """Return this many bytes; fewer if the process ends, or in time no more come."""
    parts: list[bytes] = []
    while count and select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(descriptor, count)
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
