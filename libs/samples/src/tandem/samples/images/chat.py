"""Conversations with images as tokens: the tokenizer of a model that sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tandem.common.errors import ConfigError, DataError
from tandem.common.messages import ImageRef
from tandem.samples.images.families import ImageSettings, check_tokenizer, expanded
from tandem.samples.tokenizer import Tokenizer

IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes")
"""Keys of a content part that hold the image, in the order in which they are looked for."""


class EncodedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as tokens, with the images that its image tokens stand for, in order."""

    token_ids: list[int]
    images: tuple[ImageRef, ...]


class VisionTokenizer(Tokenizer):
    """A tokenizer of a model that sees.

    A message's content may be a list of parts: ``{"type": "text", "text": ...}`` and ``{"type": "image", "image":
    ImageRef}``. All of `Tokenizer` takes such messages, and gives texts and tokens with the expansions of the images.
    """

    def __init__(self, tokenizer: Tokenizer, settings: ImageSettings) -> None:
        """Take the place of a tokenizer. Raises `ModelError` if it lacks the special tokens of images."""
        super().__init__(tokenizer.hugging_face, tokenizer.where, tokenizer._variables)
        self._template = tokenizer._template  # it knows the key that errors name
        check_tokenizer(tokenizer, settings)
        self.settings = settings
        self._reads_parts = self.has_chat_template and "type" in self._template.words

    def encode_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        refer: Callable[[Any], ImageRef],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> EncodedConversation:
        """Return the tokens of a conversation and its images; see `with_references` for `refer`.

        Raises the errors of `refer`, `render_chat` and `encode`.
        """
        referring, images = with_references(messages, refer)
        token_ids = self.encode_chat(referring, add_generation_prompt=add_generation_prompt, variables=variables)
        return EncodedConversation(token_ids=token_ids, images=images)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text by the chat template, with the expansion of each image in its place.

        Raises `DataError` for a text that contains a special token of images, and the errors of
        `Tokenizer.render_chat`.
        """
        images: list[ImageRef] = []
        plain = [{**message, "content": self._content(message.get("content"), images)} for message in messages]
        text = super().render_chat(plain, add_generation_prompt=add_generation_prompt, variables=variables)
        num_written = text.count(self.settings.family.placeholder)
        if num_written != len(images):
            raise ConfigError(
                f"policy.tokenizer.chat_template: the chat template of {self.where} writes {num_written} ×"
                f" {self.settings.family.placeholder} for {len(images)} images"
            )
        return expanded(self.settings, text, [image.grid for image in images])

    def _content(self, content: Any, images: list[ImageRef]) -> Any:
        """Return a message's content as the template reads it, and append its images."""
        if content is None or isinstance(content, str):
            parts: Sequence[Any] = [{"type": "text", "text": content}] if content else []
            if content is None and self._reads_parts:
                return None  # a message of tool calls alone
        else:
            parts = content
        out: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, Mapping) and isinstance(part.get("image"), ImageRef):
                images.append(part["image"])
                out.append({"type": "image"})
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                self._check_text(part["text"])
                out.append({"type": "text", "text": part["text"]})
            else:
                raise DataError(f"a content part is a text or an image, not {_what(part)}")
        if self._reads_parts:
            return out
        return "".join(part.get("text", self.settings.family.part) for part in out)

    def _check_text(self, text: str) -> None:
        token = next((token for token in self.settings.family.tokens if token in text), None)
        if token is not None:
            raise DataError(f"a text contains {token}, which stands for images: give the image as a content part")


def with_references(
    messages: Sequence[Mapping[str, Any]], refer: Callable[[Any], ImageRef]
) -> tuple[list[dict[str, Any]], tuple[ImageRef, ...]]:
    """Return messages whose image parts hold references, and these references, in order.

    `refer` turns the value of an image part into its reference, such as by `tandem.samples.images.reading.reference`;
    values that are references already stay. Raises what it raises, and `DataError` for parts that are neither text
    nor image.
    """
    images: list[ImageRef] = []
    out = []
    for message in messages:
        content = message.get("content")
        if content is None or isinstance(content, str):
            out.append(dict(message))
            continue
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise DataError(f"a message's content is a text or a list of parts, not {type(content).__name__}")
        parts: list[dict[str, Any]] = []
        for part in content:
            if (text := _text(part)) is not None:
                parts.append({"type": "text", "text": text})
                continue
            value = _image(part)
            images.append(value if isinstance(value, ImageRef) else refer(value))
            parts.append({"type": "image", "image": images[-1]})
        out.append({**message, "content": parts})
    return out, tuple(images)


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message has a content part that is no text."""
    contents = (message.get("content") for message in messages)
    return any(_text(part) is None for content in contents if isinstance(content, (list, tuple)) for part in content)


def _text(part: Any) -> str | None:
    """Return the text of a content part that is one."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type", "text") not in ("text", "input_text"):
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def _image(part: Any) -> Any:
    """Return the value of a content part that is an image. Raises `DataError` for any other."""
    kind = part.get("type", "image") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_url", "input_image"):
        raise DataError(f"a content part is a text or an image, not {_what(part)}")
    # Rows of Parquet have every key of every part: those of other parts are null.
    value = next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)
    if value is None:
        raise DataError(f"a content part of type {kind} has none of {', '.join(IMAGE_KEYS)}")
    return value


def _what(part: Any) -> str:
    if not isinstance(part, Mapping):
        return type(part).__name__
    return f"{part.get('type', 'an object without type')!s}"[:100]
