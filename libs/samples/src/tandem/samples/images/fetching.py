"""Fetching of images that a process's copy of the run's folder lacks, and the answers to it.

Where the run's folder is shared nothing is lacking, and nothing is sent. Elsewhere a process asks by digest, for a
bounded number of bytes at a time: first those that have samples with the images, all at once, then the coordinator.
What comes is checked, and kept in the process's own folder. It waits until one deadline, and gives up earlier on one
without a connection for `_PATIENCE_S`.

The coordinator has an `ImageServer`. Its thread consumes `FetchImages` and produces `ImagesFetched`; it waits only for
the next request, for short intervals, and ends when the server is closed. Rollouts answer for the images of their
samples beside these (`tandem.samples.sample_store`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from urllib.parse import urlsplit

import numpy as np

from tandem.common import messages
from tandem.common.curve import AdmittedKeys
from tandem.common.errors import DataError, WireError
from tandem.common.keys import KeyPair
from tandem.common.wire import AnsweringThread, Arrays, CallerConnections, Frames, MessageCodec, encode
from tandem.samples.batch import SampleBatch
from tandem.samples.images.reading import DEFAULT_LIMITS
from tandem.samples.images.store import ImageFolder

COORDINATOR = "coordinator"
_PATIENCE_S = 5.0
"""How long one that is asked may be without a connection."""
_POLL_S = 0.2
_MAX_REPLY_BYTES = max(messages.MAX_IMAGE_BYTES_FETCHED, DEFAULT_LIMITS.max_bytes)
_MAX_REQUEST_BYTES = 2**20


def answer(images: ImageFolder, run_id: str, request: messages.FetchImages) -> Frames:
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
        if data_of_digest and num_bytes > messages.MAX_IMAGE_BYTES_FETCHED:
            break
        data_of_digest[digest] = data
    reply = messages.ImagesFetched(
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
            host, admitted, messages.FetchImages, answering, name="images", max_bytes=_MAX_REQUEST_BYTES
        )
        self.at = self._answering.at
        """Its listener."""

    def close(self) -> None:
        """Stop serving."""
        self._answering.close()


class ImageFetcher:
    """A process's copy of the run's images, and its way to those that it lacks."""

    def __init__(self, images: ImageFolder, *, name: str, run_id: str, key_pair: KeyPair) -> None:
        """Take the process's own view of the run's folder, its name, and the keys that prove it."""
        self._images = images
        self._name, self._run_id, self._key_pair = name, run_id, key_pair
        self._coordinator: messages.Listener | None = None

    def begin(self, media_at: messages.Listener | None, coordinator: str) -> None:
        """Take the port and key of the coordinator's images; its host is that of `coordinator`, its own address."""
        if media_at is not None:
            address = f"{coordinator.rpartition(':')[0]}:{urlsplit(media_at.address).port}"
            self._coordinator = messages.Listener(address=address, public_key=media_at.public_key)

    def fetch(self, digests: Iterable[str], timeout_s: float) -> list[str]:
        """Have these images in the folder; return why some are not to be had, with the names of those asked."""
        return [*self.fetch_from(dict.fromkeys(digests, COORDINATOR), {}, timeout_s).values()]

    def fetch_batch(
        self, batch: SampleBatch, sources: Mapping[str, messages.Listener], timeout_s: float
    ) -> dict[str, str]:
        """Have the images of a batch in the folder; return why some are not to be had, by the source of a sample."""
        names = sorted(sources)
        flat = batch.image_digests_IX.tobytes().hex()
        digests = [flat[place : place + 64] for place in range(0, len(flat), 64)]
        of_image = batch.source_S.repeat(batch.num_images_S).tolist() if names else [0] * len(digests)
        source_by_digest = {
            digest: names[source] if names else COORDINATOR for digest, source in zip(digests, of_image, strict=True)
        }
        return self.fetch_from(source_by_digest, sources, timeout_s)

    def fetch_from(
        self, source_by_digest: Mapping[str, str], sources: Mapping[str, messages.Listener], timeout_s: float
    ) -> dict[str, str]:
        """Have images in the folder; return why some are not to be had, by source.

        `source_by_digest` has the source of each, by digest. `sources` are asked before the coordinator.
        """
        lacking = {digest: source for digest, source in source_by_digest.items() if not self._images.has(digest)}
        if not lacking:
            return {}
        deadline = time.monotonic() + timeout_s
        whys: dict[str, str] = {}
        by_source: dict[str, list[str]] = {}
        for digest, source in lacking.items():
            if source in sources:
                by_source.setdefault(source, []).append(digest)
        if by_source:
            whys |= self._ask({name: sources[name] for name in by_source}, by_source, deadline, timeout_s)
            lacking = {digest: source for digest, source in lacking.items() if not self._images.has(digest)}
        if lacking and self._coordinator is not None:
            whys |= self._ask({COORDINATOR: self._coordinator}, {COORDINATOR: [*lacking]}, deadline, timeout_s)
            lacking = {digest: source for digest, source in lacking.items() if not self._images.has(digest)}
        missing: dict[str, str] = {}
        for digest, source in lacking.items():
            names = [name for name in dict.fromkeys((source, COORDINATOR)) if name in whys]
            reasons = "; ".join(f"{name}: {whys[name]}" for name in names) or "nobody could be asked"
            missing.setdefault(source, f"{self._name} lacks image {digest[:12]}: {reasons}")
        return missing

    def _ask(
        self,
        listeners: Mapping[str, messages.Listener],
        digests_by_name: Mapping[str, list[str]],
        deadline: float,
        timeout_s: float,
    ) -> dict[str, str]:
        """Ask several processes at once until all have answered or the time is up; return why some lack some."""
        try:
            callers = CallerConnections(listeners, self._key_pair, max_bytes=_MAX_REPLY_BYTES)
        except WireError as error:
            return dict.fromkeys(listeners, str(error))
        inquiries = {name: _Inquiry(self._images, self._run_id, digests) for name, digests in digests_by_name.items()}
        try:
            while open_ones := {name: each for name, each in inquiries.items() if not each.is_done}:
                for name, frames in callers.receive(_POLL_S):
                    inquiry = inquiries[name]
                    is_next = frames is None or inquiry.take(frames)
                    if is_next and not inquiry.is_done:
                        callers.send(name, encode(inquiry.request()))
                for name, inquiry in open_ones.items():
                    if callers.down_for(name) > _PATIENCE_S:
                        inquiry.give_up(f"nobody answers at {listeners[name].address}")
                    elif time.monotonic() > deadline:
                        inquiry.give_up(f"it has not sent it within {timeout_s:g} s")
        finally:
            callers.close()
        return {name: inquiry.why for name, inquiry in inquiries.items() if inquiry.why}


class _Inquiry:
    """The requests to one process, one at a time."""

    _codec: MessageCodec[messages.ImagesFetched] = MessageCodec(messages.ImagesFetched)

    def __init__(self, images: ImageFolder, run_id: str, digests: list[str]) -> None:
        self._images, self._run_id = images, run_id
        self._left = digests
        self._number = 0
        self.why = ""
        """Why some are missing."""

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to ask for, or asking is pointless."""
        return not self._left

    def give_up(self, reason: str) -> None:
        """Ask no more, unless all was answered."""
        if self._left:
            self._left, self.why = [], reason

    def request(self) -> messages.FetchImages:
        """Return the next request, or the same one again."""
        return messages.FetchImages(
            run_id=self._run_id, request_id=self._number, digests=tuple(self._left[: messages.MAX_IMAGES_FETCHED])
        )

    def take(self, frames: list[bytes | memoryview]) -> bool:
        """Take an answer; return False if it is one that was taken before."""
        try:
            received = self._codec.decode(frames)
            if received.message.request_id != self._number:
                return False
            self._keep(received.message, received.arrays)
        except WireError as error:
            self.give_up(f"it sent what is not asked for: {error}")
        self._number += 1
        return True

    def _keep(self, reply: messages.ImagesFetched, arrays: Arrays) -> None:
        """Keep the images of an answer in the folder. Raises `WireError` unless they are what was asked for."""
        answered = {*reply.digests, *reply.gone}
        requested = {*self._left[: messages.MAX_IMAGES_FETCHED]}
        if not answered or not answered <= requested or len(reply.digests) + len(reply.gone) != len(answered):
            raise WireError("digests: not those that were asked for")
        bytes_B = arrays.get("bytes_B")
        if bytes_B is None or bytes_B.dtype != "uint8" or bytes_B.ndim != 1 or len(arrays) != 1:
            raise WireError("bytes_B: must be bytes")
        if len(reply.sizes) != len(reply.digests) or sum(reply.sizes) != len(bytes_B):
            raise WireError(f"sizes: not those of {len(reply.digests)} images of {len(bytes_B)} bytes")
        start = 0
        for digest, size in zip(reply.digests, reply.sizes, strict=True):
            try:
                self._images.put(digest, bytes_B[start : start + size].tobytes())
            except DataError as error:
                raise WireError(f"bytes_B: {error}") from error
            start += size
        if reply.gone:
            self.why = "it does not have it"
        self._left = [digest for digest in self._left if digest not in answered]
