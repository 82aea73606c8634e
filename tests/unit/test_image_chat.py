"""Conversations with images become the tokens that the processors of Transformers give."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tandem.common.errors import ConfigError, DataError, ModelError
from tandem.samples.images.chat import VisionTokenizer
from tandem.samples.images.families import expansion, grid_of, read_settings
from tandem.samples.images.reading import described
from tandem.samples.markers import MarkedImage, mark_images, marker
from tandem.samples.model_files import load_model_tokenizer
from tests.harness.vision_models import FAMILIES, encoded, image_processor, picture, whole_processor, write_vision_files

PLAIN = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_files(request.param, tmp_path_factory.mktemp("chat") / request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> VisionTokenizer:
    return VisionTokenizer(load_model_tokenizer(folder), folder)


def image(width: int = 48, height: int = 40, seed: int = 0) -> MarkedImage:
    return MarkedImage(hashlib.sha256(f"{width} {height} {seed}".encode()).hexdigest(), width, height)


def user(*parts: MarkedImage | str) -> dict[str, Any]:
    return {"role": "user", "content": "".join(marker(*p) if isinstance(p, MarkedImage) else p for p in parts)}


def expanded_in(text: str, tokenizer: VisionTokenizer, shown: MarkedImage) -> str:
    settings = tokenizer.settings
    return text.replace(settings.family.placeholder, expansion(settings, grid_of(settings, shown.width, shown.height)))


def test_tokens_are_those_of_the_processor(tokenizer: VisionTokenizer, folder: Path) -> None:
    """From pictures to tokens, and the pixels' own count of features beside them."""
    family = tokenizer.settings.family
    processor = image_processor(folder)
    theirs = whole_processor(family.model_type, folder, processor)
    pictures = [picture(48, 40, 1), picture(200, 33, 2), picture(20, 90, 3)]
    message = {
        "role": "user",
        "content": [
            {"type": "image", "image": encoded(pictures[0])},
            {"type": "text", "text": "and "},
            {"type": "image_url", "image_url": {"url": None, "bytes": encoded(pictures[1])}, "text": None},
            {"type": "image", "path": None, "bytes": encoded(pictures[2])},
            "How many?",
        ],
    }
    marked = mark_images([message], lambda value: marker(*described(value, "here")[0]))
    token_ids, images = tokenizer.encode_chat(marked, add_generation_prompt=True), tokenizer.media_in(marked)
    extra = {"return_row_col_info": True} if family.has_crops else {}
    pixels = processor(images=[pictures] if family.has_crops else pictures, return_tensors="np", **extra)
    text = f"user:{family.part}and {family.part}{family.part}How many?\nassistant:"
    first, *others = text.split(family.placeholder)
    whole = first + "".join(theirs.replace_image_token(pixels, index) + rest for index, rest in enumerate(others))
    assert token_ids == tokenizer.encode(whole)
    assert [(image.width, image.height) for image in images] == [(48, 40), (200, 33), (20, 90)]
    assert token_ids.count(tokenizer.settings.image_token_id) == sum(image.num_tokens for image in images)


def test_a_later_turn_has_its_own_images(tokenizer: VisionTokenizer) -> None:
    after = tokenizer.encode_continuation([user("look ", image())], tokenizer.eos_id)
    text = f"\nuser:look {tokenizer.settings.family.part}\nassistant:"
    assert after == tokenizer.encode(expanded_in(text, tokenizer, image()))


def test_a_rendered_conversation_has_its_markers(tokenizer: VisionTokenizer) -> None:
    messages = [user(image(), "and ", image(20, 90)), {"role": "assistant", "content": "three"}]
    before = tokenizer.render_chat(messages[:1], add_generation_prompt=True)
    assert [each in before for each in (marker(*image()), marker(*image(20, 90)))] == [True, True]
    assert tokenizer.render_chat(messages, add_generation_prompt=False).startswith(before)
    assert tokenizer.unknown_characters(before) == ""


def test_a_conversation_without_images_is_as_before(tokenizer: VisionTokenizer) -> None:
    plain = load_model_tokenizer(Path(tokenizer.where))
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "three"}]
    for generation in (False, True):
        assert tokenizer.encode_chat(messages, add_generation_prompt=generation) == plain.encode_chat(
            messages, add_generation_prompt=generation
        )
    assert tokenizer.encode_continuation(messages[:1], 5) == plain.encode_continuation(messages[:1], 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_without_parts_gets_texts(family: str, tmp_path: Path) -> None:
    write_vision_files(family, tmp_path, PLAIN)
    tokenizer = VisionTokenizer(load_model_tokenizer(tmp_path), tmp_path)
    messages = [user("a ", image(), " b"), {"role": "assistant", "content": "c"}]
    shown = f"user:a {tokenizer.settings.family.part} b\nassistant:c\n"
    token_ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert token_ids == tokenizer.encode(expanded_in(shown, tokenizer, image()))


def test_a_template_that_drops_images_is_refused(folder: Path, tmp_path: Path) -> None:
    texts = "{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}{% endfor %}"
    template = "{% for m in messages %}" + texts + "{% endfor %}"
    family = read_settings(folder).family.model_type
    write_vision_files(family, tmp_path, template)
    tokenizer = VisionTokenizer(load_model_tokenizer(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=r"chat_template: .* writes 0 × <.*> for 1 images"):
        tokenizer.render_chat([user("a", image())], add_generation_prompt=True)


def test_a_text_cannot_pretend_to_be_an_image(tokenizer: VisionTokenizer) -> None:
    for token in tokenizer.settings.family.tokens:
        with pytest.raises(DataError, match=r"a text contains <.*, which stands for images"):
            tokenizer.encode_chat([user(f"what is {token}?")], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "video", "video": "a.mp4"}, "not video"),
        ({"type": "audio"}, "not audio"),
        ({"type": "image"}, "has none of image, image_url"),
        ({"type": "text"}, "not text"),
        (3, "not int"),
        (None, "not NoneType"),
    ],
)
def test_other_parts_are_refused(part: object, says: str) -> None:
    with pytest.raises(DataError, match=says):
        mark_images([{"role": "user", "content": [part]}], str)


def test_content_is_text_or_parts() -> None:
    for content in (3, {"type": "text"}, b"abc"):
        with pytest.raises(DataError, match="a message's content is a text or a list of parts"):
            mark_images([{"role": "user", "content": content}], str)


def test_an_image_that_the_family_cannot_take(tokenizer: VisionTokenizer) -> None:
    if not tokenizer.settings.family.is_qwen:
        pytest.skip("other families take every shape")
    for refuse in (tokenizer.media_in, lambda said: tokenizer.encode_chat(said, add_generation_prompt=True)):
        with pytest.raises(DataError, match="402 × 2 pixels are too narrow"):
            refuse([user(image(402, 2))])


def test_other_fields_stay() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "name": "n", "content": ["a ", {"type": "image", "url": "u"}, {"text": " b"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    marked = mark_images(messages, lambda value: f"<{value}>")
    assert marked == [messages[0], {"role": "user", "name": "n", "content": "a <u> b"}, messages[2]]


def test_a_tokenizer_of_texts_is_refused(tokenizer: VisionTokenizer, tmp_path: Path) -> None:
    others = "idefics3" if tokenizer.settings.family.model_type == "gemma3" else "gemma3"
    other = load_model_tokenizer(write_vision_files(others, tmp_path))
    with pytest.raises(ModelError, match="has no token"):
        VisionTokenizer(other, Path(tokenizer.where))
