"""Answers to processes that do not see the run's folder, and ask for its images.

The coordinator has an `ImageServer`. Its thread consumes `FetchImages` and produces `ImagesFetched`; it waits only for
the next request, for short intervals, and ends when the server is closed. Rollouts answer for the images of their
samples beside these (`tandem.samples.sample_store`).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tandem.common.curve import AdmittedKeys
from tandem.common.errors import DataError
from tandem.common.messages import MAX_IMAGE_BYTES_FETCHED, FetchImages, ImagesFetched
from tandem.common.wire import AnsweringThread, Frames, encode
from tandem.samples.images.store import ImageFolder

_MAX_REQUEST_BYTES = 2**20


def answer(images: ImageFolder, run_id: str, request: FetchImages) -> Frames:
    """Return the reply to a request: images that a folder has, as many as fit into a message."""
    data_of_digest: dict[str, bytes] = {}
    gone = []
    num_bytes = 0
    for digest in request.digests:
        try:
            data = images.get(digest) if request.run_id == run_id else b""
        except DataError:
            data = b""
        if not data:
            gone.append(digest)
            continue
        num_bytes += len(data)
        if data_of_digest and num_bytes > MAX_IMAGE_BYTES_FETCHED:
            break
        data_of_digest[digest] = data
    reply = ImagesFetched(
        request_id=request.request_id,
        digests=tuple(data_of_digest),
        sizes=tuple(map(len, data_of_digest.values())),
        gone=tuple(gone),
    )
    return encode(reply, {"bytes_B": np.frombuffer(b"".join(data_of_digest.values()), dtype=np.uint8)})


class ImageServer:
    """The images of a run, for its processes on other hosts."""

    def __init__(self, host: str, run_id: str, images: ImageFolder, admitted: AdmittedKeys) -> None:
        """Listen on a port of `host`, for the processes with these keys."""
        answering = partial(answer, images, run_id)
        self._answering = AnsweringThread(
            host, admitted, FetchImages, answering, name="images", max_bytes=_MAX_REQUEST_BYTES
        )
        self.at = self._answering.at
        """Its listener."""

    def close(self) -> None:
        """Stop serving."""
        self._answering.close()
