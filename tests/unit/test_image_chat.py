"""Conversations with images become the tokens that the processors of Transformers give."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tandem.common.errors import ConfigError, DataError, ModelError
from tandem.common.messages import ImageRef
from tandem.samples.images.chat import VisionTokenizer, has_images, with_references
from tandem.samples.images.families import expansion, grid_of, num_tokens, read_settings
from tandem.samples.images.reading import reference
from tandem.samples.tokenizer import load_model_tokenizer
from tests.harness.vision_models import FAMILIES, encoded, image_processor, picture, whole_processor, write_vision_files

PLAIN = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_files(request.param, tmp_path_factory.mktemp("chat") / request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> VisionTokenizer:
    return VisionTokenizer(load_model_tokenizer(folder), read_settings(folder))


def ref(tokenizer: VisionTokenizer, width: int = 48, height: int = 40, seed: int = 0) -> ImageRef:
    grid = grid_of(tokenizer.settings, width, height)
    digest = hashlib.sha256(f"{width} {height} {seed}".encode()).hexdigest()
    number = num_tokens(tokenizer.settings, grid)
    return ImageRef(digest=digest, width=width, height=height, grid=grid, num_tokens=number)


def user(*parts: object) -> dict[str, Any]:
    content = [
        {"type": "image", "image": part} if isinstance(part, ImageRef) else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


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
    got = tokenizer.encode_images(
        [message],
        lambda value: reference(value, "here", tokenizer.settings)[0],
        add_generation_prompt=True,
    )
    extra = {"return_row_col_info": True} if family.has_crops else {}
    pixels = processor(images=[pictures] if family.has_crops else pictures, return_tensors="np", **extra)
    text = f"user:{family.part}and {family.part}{family.part}How many?\nassistant:"
    first, *others = text.split(family.placeholder)
    whole = first + "".join(theirs.replace_image_token(pixels, index) + rest for index, rest in enumerate(others))
    assert got.token_ids == tokenizer.encode(whole)
    assert [(image.width, image.height) for image in got.images] == [(48, 40), (200, 33), (20, 90)]
    assert got.token_ids.count(tokenizer.settings.image_token_id) == sum(image.num_tokens for image in got.images)


def test_a_later_turn_has_its_own_images(tokenizer: VisionTokenizer) -> None:
    image = ref(tokenizer)
    after = tokenizer.encode_continuation([user("look ", image)], tokenizer.eos_id)
    text = f"\nuser:look {tokenizer.settings.family.part}\nassistant:"
    shown = text.replace(tokenizer.settings.family.placeholder, expansion(tokenizer.settings, image.grid))
    assert after == tokenizer.encode(shown)


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
    tokenizer = VisionTokenizer(load_model_tokenizer(tmp_path), read_settings(tmp_path))
    image = ref(tokenizer)
    messages = [user("a ", image, " b"), {"role": "assistant", "content": "c"}]
    part = tokenizer.settings.family.part
    shown = f"user:a {part} b\nassistant:c\n".replace(
        tokenizer.settings.family.placeholder, expansion(tokenizer.settings, image.grid)
    )
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == shown


def test_a_template_that_drops_images_is_refused(folder: Path, tmp_path: Path) -> None:
    texts = "{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}{% endfor %}"
    template = "{% for m in messages %}" + texts + "{% endfor %}"
    family = read_settings(folder).family.model_type
    write_vision_files(family, tmp_path, template)
    tokenizer = VisionTokenizer(load_model_tokenizer(tmp_path), read_settings(tmp_path))
    with pytest.raises(ConfigError, match=r"chat_template: .* writes 0 × <.*> for 1 images"):
        tokenizer.render_chat([user("a", ref(tokenizer))], add_generation_prompt=True)


def test_a_text_cannot_pretend_to_be_an_image(tokenizer: VisionTokenizer) -> None:
    for token in tokenizer.settings.family.tokens:
        for message in (user(f"what is {token}?"), {"role": "user", "content": f"what is {token}?"}):
            with pytest.raises(DataError, match=r"a text contains <.*, which stands for images"):
                tokenizer.encode_chat([message], add_generation_prompt=True)


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
    def refer(value: object) -> ImageRef:
        raise AssertionError(value)

    messages = [{"role": "user", "content": [part]}]
    assert has_images(messages)
    with pytest.raises(DataError, match=says):
        with_references(messages, refer)


def test_content_is_text_or_parts() -> None:
    for content in (3, {"type": "text"}, b"abc"):
        with pytest.raises(DataError, match="a message's content is a text or a list of parts"):
            with_references([{"role": "user", "content": content}], lambda value: value)


def test_references_stay_and_other_fields_too(tokenizer: VisionTokenizer) -> None:
    first, second = ref(tokenizer), ref(tokenizer, seed=1)
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "name": "n", "content": [{"type": "image", "image": first}, {"type": "image", "url": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    asked: list[object] = []

    def refer(value: object) -> ImageRef:
        asked.append(value)
        return second

    out, images = with_references(messages, refer)
    assert (asked, images) == (["u"], (first, second))
    assert out[0] == messages[0]
    assert out[1]["name"] == "n"
    assert out[2] == messages[2]
    assert not has_images(messages[:1])
    assert has_images(messages)


def test_a_tokenizer_of_texts_is_refused(tokenizer: VisionTokenizer, tmp_path: Path) -> None:
    others = "idefics3" if tokenizer.settings.family.model_type == "gemma3" else "gemma3"
    other = load_model_tokenizer(write_vision_files(others, tmp_path))
    with pytest.raises(ModelError, match="has no token"):
        VisionTokenizer(other, tokenizer.settings)
