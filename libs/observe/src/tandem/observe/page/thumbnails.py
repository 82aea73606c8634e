"""Thumbnails of a run's images, made by a process of their own.

A picture that hangs or eats memory ends only that process. Nothing here imports PIL, and the process is started for the
first picture that is asked for.
"""

from __future__ import annotations

import base64
import contextlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.common.errors import DataError
from tandem.observe.page.worker import PageWorker
from tandem.samples.batch import list_media
from tandem.samples.images.store import BoundedCache, ImageFolder
from tandem.samples.markers import marked_in

if TYPE_CHECKING:
    from tandem.samples.sample_record import RecordedSample

FOLDER = "images"
"""Folder of a run's images within its own."""
MOST_BYTES = 1 << 18
"""Most bytes of a thumbnail; one of 96 × 96 pixels has a tenth of that."""
_WORKER = "tandem.observe.page.thumbnail_worker"
_DEADLINE_S = 15.0
"""Seconds for a picture, the start of the process included."""
_MOST_HELD = 1 << 24
_DIGEST = re.compile(r"[0-9a-f]{64}")


class RunThumbnails:
    """The thumbnails of images by digest. Threads may share it."""

    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        """Start nothing yet; `deadline_s` is what a picture may take."""
        self._deadline_s = deadline_s
        self._made: BoundedCache[bytes] = BoundedCache(lambda thumbnail: len(thumbnail) + 64, _MOST_HELD)
        """Thumbnails by digest; empty for pictures that cannot be shown."""
        self._lock = threading.Lock()
        self._worker = PageWorker([_WORKER], MOST_BYTES)

    def of(self, run: Path, digest: str) -> bytes:
        """Return the thumbnail of an image of a run as PNG.

        Raises `DataError` if the run has no such image, if it cannot be decoded, or takes too long.
        """
        if not _DIGEST.fullmatch(digest):
            raise DataError("an image's name is its SHA-256: 64 hexadecimal digits")
        images = ImageFolder(run / FOLDER)
        if not images.has(digest):
            raise DataError(f"the run has no image {digest[:12]}")
        png = self._made.find(digest)
        if png is None:
            data = images.get(digest)
            if not self._lock.acquire(timeout=2 * self._deadline_s):
                raise DataError("other pictures take too long: ask again later")
            try:
                png = self._made.find(digest)
                if png is None:
                    png = self._worker.ask(data, time.monotonic() + self._deadline_s) or b""
                    if not png and self._worker.was_stopped:
                        png = self._worker.ask(data, time.monotonic() + self._deadline_s) or b""
                    self._made.put(digest, png)
            finally:
                self._lock.release()
        if not png:
            raise DataError(f"image {digest[:12]} cannot be shown: it is damaged, too large, or takes too long")
        return png

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._worker.end()


def embed_thumbnails(run: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the thumbnails of the images of samples, each once, as data URIs by digest."""
    prompts = (image.digest for row in rows for image in marked_in(row["prompt"]))
    later = (digest for row in rows for digest in row.get("later_images", ()))
    pictures = {}
    with contextlib.closing(RunThumbnails()) as thumbnails:
        for digest in dict.fromkeys([*prompts, *later]):
            with contextlib.suppress(DataError):
                png = thumbnails.of(run, digest)
                pictures[digest] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return {"pictures": pictures}


def later_in(sample: RecordedSample) -> dict[str, Any]:
    """Return the digests of the images after the prompt, where there are any: answers of the environment's."""
    later = dict.fromkeys(list_media(sample.arrays)[len(marked_in(sample.prompt)) :])
    return {"later_images": [*later]} if later else {}
