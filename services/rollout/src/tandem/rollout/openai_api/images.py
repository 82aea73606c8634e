"""Images of requests: kept in memory until the engine has encoded them."""

from __future__ import annotations

from tandem.common.errors import DataError
from tandem.rollout.openai_api.refusals import Refused
from tandem.samples.images.markers import marker
from tandem.samples.images.reading import ImageLimits, described
from tandem.samples.images.store import BoundedImages

_MAX_BYTES = 2**28
_LIMITS = ImageLimits(max_bytes=2**24, allow_paths=False)


class ReceivedImages:
    """The images that clients sent, by digest; those longest unused are forgotten first."""

    def __init__(self) -> None:
        self._held = BoundedImages(_gone, _MAX_BYTES)

    def mark(self, url: str) -> str:
        """Keep an image, given as a data URI, and return its marker. Raises `Refused`."""
        try:
            found, data = described(url, "messages", _LIMITS)
        except DataError as error:
            raise Refused(str(error), param="messages") from error
        assert isinstance(data, bytes), "no file is read"
        self._held.put(found.digest, data)
        return marker(*found)

    def get(self, digest: str) -> bytes:
        """Return the bytes of an image. Raises `DataError` if it is no longer held."""
        return self._held.get(digest)


def _gone(digest: str) -> bytes:
    raise DataError(f"image {digest[:12]} is no longer held: too many others were sent since")
