"""Sequences with images as text for people: a marker for each, whatever tokens the family has for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common.messages import ImageRef
from tandem.samples.images.chat import MarkedTexts, VisionTokenizer, marked_texts
from tandem.samples.images.reading import described
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import MarkedImage, marked_in, marker
from tandem.samples.model_files import load_model_tokenizer
from tests.harness.vision_models import FAMILIES, encoded, picture, write_vision_files

PICTURES = [encoded(picture(*size, seed)) for seed, size in enumerate([(48, 40), (90, 40), (48, 40)])]


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> VisionTokenizer:
    folder = write_vision_files(request.param, tmp_path / "model")
    return VisionTokenizer(load_model_tokenizer(folder), folder)


def keep(folder: ImageFolder) -> list[MarkedImage]:
    found = [described(data, "here")[0] for data in PICTURES]
    for each, data in zip(found, PICTURES, strict=True):
        folder.put(each.digest, data)
    return found


def asked(tokenizer: VisionTokenizer, *parts: str | MarkedImage) -> tuple[list[int], tuple[ImageRef, ...]]:
    """Return the tokens and images of a message."""
    content = "".join(part if isinstance(part, str) else marker(*part) for part in parts)
    messages = [{"role": "user", "content": content}]
    return tokenizer.encode_chat(messages, add_generation_prompt=True), tokenizer.media_in(messages)


def test_a_marker_stands_for_all_tokens_of_an_image(tokenizer: VisionTokenizer, tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    first, second, third = keep(folder)
    ids, images = asked(tokenizer, first, second, "How many?", third, "And here?")
    digests = [image.digest for image in images]
    for known in ((), images):
        text = MarkedTexts(tokenizer, folder).text_of(ids, digests, known)
        assert marked_in(text) == [first, second, third]
        assert "How many?" in text
        assert text.index("How many?") < text.index(marker(*third)) < text.index("And here?")
        assert tokenizer.settings.family.image_token not in text
        plain = "".join(text.split("⟦"))
        assert not [token for token in tokenizer.settings.family.tokens if token in plain]
    only = asked(tokenizer, "How many?")[0]
    assert MarkedTexts(tokenizer, folder).text_of(only, digests) == tokenizer.decode(only, skip_special_tokens=False)


def test_an_image_that_is_gone_leaves_its_place(tokenizer: VisionTokenizer, tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    first, second, _ = keep(folder)
    folder.path(first.digest).unlink()
    ids, images = asked(tokenizer, first, "and", second)
    text = MarkedTexts(tokenizer, folder).text_of(ids, [image.digest for image in images])
    assert marked_in(text) == [second]
    assert text.count(tokenizer.settings.family.placeholder) == 1


def test_what_is_no_whole_image_is_shown_as_it_is(tokenizer: VisionTokenizer, tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    first, _, _ = keep(folder)
    ids, images = asked(tokenizer, first, "How many?")
    torn = ids[: ids.index(tokenizer.image_token_id) + 3]
    text = MarkedTexts(tokenizer, folder).text_of(torn, [image.digest for image in images])
    assert text == tokenizer.decode(torn, skip_special_tokens=False) or marked_in(text) == [first]


def test_a_text_model_has_no_such_decoder(tokenizer: VisionTokenizer, tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    assert marked_texts(None, folder) is None
    assert marked_texts(load_model_tokenizer(tmp_path / "model"), folder) is None
    assert marked_texts(tokenizer, folder) is not None
