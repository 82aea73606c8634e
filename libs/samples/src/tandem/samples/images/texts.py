"""Tokens of sequences with images as text for people: a marker in the place of each image's tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from tandem.common.errors import ConfigError, DataError
from tandem.common.messages import ImageRef
from tandem.samples.images.chat import VisionTokenizer
from tandem.samples.images.families import collapse
from tandem.samples.images.markers import MarkedImage, marker
from tandem.samples.images.reading import described
from tandem.samples.images.store import ImageFolder
from tandem.samples.tokenizer import Tokenizer

_MAX_SIZES = 4096
"""Images whose sizes are kept."""


class MarkedTexts:
    """A decoder of sequences with images, for a vision model."""

    def __init__(self, tokenizer: VisionTokenizer, images: ImageFolder) -> None:
        """`images` are those of the run: their files say how large they are."""
        self._tokenizer = tokenizer
        self._images = images
        self._marked = functools.lru_cache(maxsize=_MAX_SIZES)(self._read)

    def text_of(self, token_ids: Sequence[int], digests: Sequence[str], references: Iterable[ImageRef] = ()) -> str:
        """Return the text of tokens, special ones included, with a marker for each image.

        Args:
            token_ids: tokens of a part of a sequence that divides no image.
            digests: its images, in order; more of them may follow.
            references: references of images whose files need not be asked.

        """
        settings = self._tokenizer.settings
        try:
            plain = self._tokenizer.decode(collapse(token_ids, self._tokenizer, settings), skip_special_tokens=False)
        except DataError:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        sizes = {image.digest: MarkedImage(image.digest, image.width, image.height) for image in references}
        placeholder = settings.family.placeholder
        text, *parts = plain.split(placeholder)
        for number, part in enumerate(parts):
            digest = digests[number] if number < len(digests) else None
            image = None if digest is None else sizes.get(digest) or self._marked(digest)
            text += (placeholder if image is None else marker(*image)) + part
        return text

    def _read(self, digest: str) -> MarkedImage | None:
        """Return what a marker says of an image; None if its file is gone or damaged."""
        try:
            return described(self._images.get(digest), "image")[0]
        except (ConfigError, DataError):
            return None


def marked_texts(tokenizer: Tokenizer | None, images: ImageFolder) -> MarkedTexts | None:
    """Return the decoder of a run's sequences; None if its model does not see."""
    return MarkedTexts(tokenizer, images) if isinstance(tokenizer, VisionTokenizer) else None
