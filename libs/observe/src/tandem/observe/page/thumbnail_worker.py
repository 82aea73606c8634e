"""The process that makes thumbnails for the page, within limits: images come in, small PNGs go out.

Each request and each answer is a length of four bytes, the highest first, and so many bytes; an answer of none says
that the picture cannot be decoded. The process ends with its input, and when nothing has been asked for a while.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import select
import signal
import sys
import time

from tandem.common.errors import TandemError
from tandem.samples.images.reading import ImageLimits, decode

SIDE = 96
"""Longest side of a thumbnail, in pixels."""
_MEMORY = 2 * 2**30
"""Most bytes of address space."""
_CPU_S = 10
"""Most seconds of computation for a picture; the kernel then ends the process."""
_IDLE_S = 30.0


def main() -> None:
    """Answer requests until the input ends, or nothing comes for `_IDLE_S`."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the page ends this process by closing its input
    os.nice(10)
    with contextlib.suppress(TandemError):
        thumbnail(b"")  # imports what reads pictures, before memory is limited
    _limit(resource.RLIMIT_AS, _MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    while select.select([0], [], [], _IDLE_S)[0]:
        head = _read(4)
        if len(head) < 4:
            return
        data = _read(int.from_bytes(head, "big"))
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + _CPU_S)
        try:
            made = thumbnail(data)
        except (TandemError, MemoryError):
            made = b""
        sys.stdout.buffer.write(len(made).to_bytes(4, "big") + made)
        sys.stdout.buffer.flush()


def thumbnail(data: bytes) -> bytes:
    """Return a picture as a PNG of at most `SIDE` pixels a side. Raise `DataError` if it is none."""
    from PIL import PngImagePlugin  # noqa: F401  # the writer, which PIL would look for among all of its modules

    picture = decode(data, "image", ImageLimits())
    picture.thumbnail((SIDE, SIDE))
    made = io.BytesIO()
    picture.save(made, "PNG")
    return made.getvalue()


def _read(count: int) -> bytes:
    """Return this many bytes of the input; fewer at its end."""
    parts: list[bytes] = []
    while count and (part := os.read(0, min(count, 2**20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
