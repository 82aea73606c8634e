"""Images of requests: in memory until the engine has read them, or in the run's folder."""

from __future__ import annotations

from collections.abc import Callable

from tandem.common.errors import DataError, TandemError
from tandem.rollout.openai_api.refusals import OpenAIRefused
from tandem.samples.images.reading import ImageLimits, described
from tandem.samples.images.store import BoundedCache, BoundedImages, ImageFolder
from tandem.samples.markers import MarkedImage, marked_in, marker

_MAX_BYTES = 2**28
_MAX_SIZES = 2**14
LIMITS = ImageLimits(max_bytes=2**24, allow_paths=False)
"""Limits of an image that a client sends."""


class RequestImages:
    """The images that clients may refer to: they send one as a data URI, or repeat the marker of one that is there."""

    def __init__(
        self, keep: Callable[[str, bytes], object], read: Callable[[str], bytes], limits: ImageLimits = LIMITS
    ) -> None:
        """`keep` takes the bytes of a digest, and `read` returns them or raises `DataError`."""
        self.get = read
        self._keep = keep
        self._limits = limits
        self._sizes: BoundedCache[MarkedImage] = BoundedCache(lambda _: 1, _MAX_SIZES)

    def mark(self, url: str) -> str:
        """Keep an image, given as a data URI, and return its marker. Raises `OpenAIRefused`."""
        try:
            image, data = described(url, "messages", self._limits)
        except DataError as error:
            raise OpenAIRefused(str(error), param="messages") from error
        assert isinstance(data, bytes), "no file is read"
        try:
            self._keep(image.digest, data)
        except TandemError as error:  # a full disk, for example
            raise OpenAIRefused(str(error), status=503, kind="server_error") from error
        self._sizes.put(image.digest, image)
        return marker(*image)

    def check(self, text: str) -> None:
        """Raise `OpenAIRefused` for a marker of an image that is not there, or of another size."""
        for marked in marked_in(text):
            if self._described(marked.digest) != marked:
                shown = marker(*marked).replace(marked.digest, f"{marked.digest[:12]}...")
                message = f"messages: {shown} in a text stands for no image that is held here: send it as image_url"
                raise OpenAIRefused(message, param="messages")

    def _described(self, digest: str) -> MarkedImage | None:
        image = self._sizes.find(digest)
        if image is None:
            try:
                image = described(self.get(digest), "messages", self._limits)[0]
            except DataError:
                return None
            self._sizes.put(digest, image)
        return image


def received_images(read: Callable[[str], bytes] | None = None, limits: ImageLimits = LIMITS) -> RequestImages:
    """Return a keeper of images in memory; those longest unused are forgotten first. `read` knows others."""
    images = BoundedImages(_gone if read is None else read, _MAX_BYTES)
    return RequestImages(images.put, images.get, limits)


def stored_images(folder: ImageFolder, limits: ImageLimits = LIMITS) -> RequestImages:
    """Return a keeper of images in a run's folder, once each."""
    return RequestImages(folder.put, folder.get, limits)


def limits_of(max_pixels: int) -> ImageLimits:
    """Return the limits of images that clients send, with ``data.max_image_pixels``."""
    return ImageLimits(max_bytes=LIMITS.max_bytes, max_pixels=max_pixels, allow_paths=False)


def _gone(digest: str) -> bytes:
    raise DataError(f"image {digest[:12]} is no longer held: too many others were sent since")
