"""Conversations with images as tokens, the tokenizer of a vision model, and its tokens as text."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.common.errors import ConfigError, DataError
from tandem.common.messages import ImageRef, Media
from tandem.samples.batch import SampleBatch
from tandem.samples.images import families
from tandem.samples.images.reading import described
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import MarkedImage, marked_in, marker, split_at_markers
from tandem.samples.tokenizer import Tokenizer

_MAX_SIZES = 4096
"""Images whose sizes are kept."""


class VisionTokenizer(Tokenizer):
    """The tokenizer of a vision model: markers in texts become the tokens of their images.

    A rendered conversation still has its markers, where the template writes its placeholders.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Take the place of a tokenizer; `folder` has the files of its model.

        Raises `ModelError` if they do not say how images become tokens, or if special tokens of images are missing.
        """
        super().__init__(tokenizer.hugging_face, tokenizer.where, tokenizer._variables)
        self._template = tokenizer._template  # it knows the key that errors name
        self.model_folders = tokenizer.model_folders
        self._folder = folder
        self.settings = families.read_settings(folder, tokenizer.where)
        families.check_tokenizer(tokenizer, self.settings)
        self._reads_parts = self.has_chat_template and "type" in self._template.words

    @property
    def takes_media(self) -> bool:
        """Whether the model takes more than text: it takes images."""
        return True

    @property
    def image_token_id(self) -> int:
        """The token that stands for a feature of an image."""
        return self.settings.image_token_id

    def save(self, folder: Path) -> None:
        """Write the files of tokenizer and image processor beside a model's weights."""
        super().save(folder)
        for name in ("config.json", *families.PROCESSOR_FILES):
            if (self._folder / name).exists() and not (folder / name).exists():
                shutil.copyfile(self._folder / name, folder / name)

    def media_in(self, messages: Sequence[Mapping[str, Any]]) -> Media:
        """Return the images of messages, in order. Raises `DataError` for one of a shape that the family refuses."""
        contents = (message.get("content") for message in messages)
        return tuple(self._reference(image) for text in contents if isinstance(text, str) for image in marked_in(text))

    def media_of_prompt(self, sample: SampleBatch, prompt_length: int) -> bytes:
        """Return the digests of the images in a recorded sample's prompt."""
        num_left = int((sample.token_ids_T[:prompt_length] == self.settings.image_token_id).sum())
        num_images = 0
        while num_left > 0 and num_images < len(sample.image_grids_IX):
            grid = sample.image_grids_IX[num_images].tolist()
            num_left -= families.num_tokens(self.settings, grid[: families.grid_size(self.settings.family)])
            num_images += 1
        return sample.image_digests_IX[:num_images].tobytes()

    def explain_wrong_media(self, prompt_ids: Sequence[int], media: Media) -> str | None:
        """Return what is wrong with the images of a prompt; None if its image tokens are those of its images."""
        num_present = prompt_ids.count(self.image_token_id)
        num_needed = sum(image.num_tokens for image in media)
        if num_present == num_needed:
            return None
        return f"the prompt has {num_present} image tokens, its images need {num_needed}"

    def _reference(self, image: MarkedImage) -> ImageRef:
        grid = families.grid_of(self.settings, image.width, image.height)
        return ImageRef(
            digest=image.digest,
            width=image.width,
            height=image.height,
            grid=grid,
            num_tokens=families.num_tokens(self.settings, grid),
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text by the chat template, with the marker of each image in its place.

        Raises `DataError` for a text that contains a special token of images, and the errors of
        `Tokenizer.render_chat`.
        """
        images: list[MarkedImage] = []
        plain = [{**message, "content": self._content(message.get("content"), images)} for message in messages]
        text = super().render_chat(plain, add_generation_prompt=add_generation_prompt, variables=variables)
        placeholder = self.settings.family.placeholder
        first, *parts = text.split(placeholder)
        if len(parts) != len(images):
            raise ConfigError(
                f"policy.tokenizer.chat_template: the chat template of {self.where} writes {len(parts)} × "
                f"{placeholder} for {len(images)} images"
            )
        return first + "".join(marker(*image) + part for image, part in zip(images, parts, strict=True))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text, with those of each image in the place of its marker.

        Raises `DataError` for an image of a shape that the family refuses, and the errors of `Tokenizer.encode`.
        """
        images = marked_in(text)
        if images:
            placeholder = self.settings.family.placeholder
            parts = (placeholder if isinstance(part, MarkedImage) else part for part in split_at_markers(text))
            grids = [families.grid_of(self.settings, image.width, image.height) for image in images]
            text = families.expand(self.settings, "".join(parts), grids)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_parts(self, text: str, places: Sequence[int]) -> list[list[int]]:
        """Return the tokens of a text, divided at these characters, with those of each image for its marker."""
        bounds = [0, *places, len(text)]
        return [self.encode(text[begin:end]) for begin, end in itertools.pairwise(bounds)]

    def unknown_characters(self, text: str) -> str:
        """Return the characters of a text, without its markers, that the tokenizer does not know, each once."""
        return super().unknown_characters("".join(part for part in split_at_markers(text) if isinstance(part, str)))

    def _content(self, content: Any, images: list[MarkedImage]) -> Any:
        """Return a message's content as the template reads it, and append its images."""
        if not isinstance(content, str):
            return content  # a message of tool calls alone
        parts = split_at_markers(content)
        for part in parts:
            if isinstance(part, MarkedImage):
                images.append(part)
            else:
                self._check_text(part)
        if not self._reads_parts:
            return "".join(self.settings.family.part if isinstance(part, MarkedImage) else part for part in parts)
        return [
            {"type": "image"} if isinstance(part, MarkedImage) else {"type": "text", "text": part} for part in parts
        ]

    def _check_text(self, text: str) -> None:
        token = next((token for token in self.settings.family.tokens if token in text), None)
        if token is not None:
            raise DataError(f"a text contains {token}, which stands for images")


class MarkedTexts:
    """A decoder of sequences with images, for a vision model."""

    def __init__(self, tokenizer: VisionTokenizer, images: ImageFolder) -> None:
        """`images` are those of the run: their files say how large they are."""
        self._tokenizer = tokenizer
        self._images = images
        self._marked = functools.lru_cache(maxsize=_MAX_SIZES)(self._read)

    def text_of(self, token_ids: Sequence[int], digests: Sequence[str], references: Media = ()) -> str:
        """Return the text of tokens, special ones included, with a marker for each image.

        Args:
            token_ids: tokens of a part of a sequence that divides no image.
            digests: its images, in order; more of them may follow.
            references: references of images whose files need not be asked.

        """
        settings = self._tokenizer.settings
        try:
            plain = self._tokenizer.decode(
                families.collapse(token_ids, self._tokenizer, settings), skip_special_tokens=False
            )
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
