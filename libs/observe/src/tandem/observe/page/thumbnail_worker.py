"""The process that makes thumbnails for the page, within limits: images come in, small PNGs go out.

An answer without bytes says that the picture cannot be decoded.
"""

from __future__ import annotations

import contextlib
import io
import resource
import time

from tandem.common.errors import TandemError
from tandem.observe.page.worker import answer_requests
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
    with contextlib.suppress(TandemError):
        thumbnail(b"")  # imports what reads pictures, before memory is limited
    _limit(resource.RLIMIT_AS, _MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)

    def answer(data: bytes) -> bytes:
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + _CPU_S)
        try:
            return thumbnail(data)
        except (TandemError, MemoryError):
            return b""

    answer_requests(answer, _IDLE_S)


def thumbnail(data: bytes) -> bytes:
    """Return a picture as a PNG of at most `SIDE` pixels a side. Raise `DataError` if it is none."""
    from PIL import PngImagePlugin  # noqa: F401  # the writer, which PIL would look for among all of its modules

    picture = decode(data, "image", ImageLimits())
    picture.thumbnail((SIDE, SIDE))
    png = io.BytesIO()
    picture.save(png, "PNG")
    return png.getvalue()


def _limit(kind: int, largest: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (largest if hard == resource.RLIM_INFINITY else min(largest, hard), hard))


if __name__ == "__main__":
    main()
