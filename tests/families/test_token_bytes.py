"""The bytes and texts of tokens of real tokenizers: joined, they are what Transformers decodes."""

from __future__ import annotations

import pytest
from tokenizers.decoders import DecodeStream

from tandem.rollout.openai_api.text import TextStream
from tandem.samples.tokenizer import Tokenizer
from tests.harness import families
from tests.harness.families import FAMILIES, Family

TEXTS = (
    "Hello world",
    "  two  spaces\n\tand a tab ",
    "naïve café, 東京 🙂‍↕️ \u0378",
    "f(x) = 3*x**2 + 1\nreturn {'a': [1, 2]}",
    " leading",
    "",
)
TOKENIZERS = tuple({family.tokenizer: family for family in FAMILIES}.values())
PREPENDS_SPACE = {"llama2"}
"""Tokenizers of SentencePiece with `add_dummy_prefix`: every text begins with a space."""


@pytest.mark.parametrize("family", TOKENIZERS, ids=lambda family: family.tokenizer)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_text_are_the_text(family: Family, text: str) -> None:
    hugging_face = families.hugging_face(family)
    tokenizer = Tokenizer(hugging_face, family.name)
    token_ids = hugging_face(text, add_special_tokens=False)["input_ids"]
    joined = b"".join(map(tokenizer.token_bytes, token_ids))
    assert joined.decode() == (f" {text}" if text and family.tokenizer in PREPENDS_SPACE else text)
    decoded = hugging_face.decode(token_ids, clean_up_tokenization_spaces=False)
    assert joined.decode().removeprefix(" " if family.tokenizer in PREPENDS_SPACE else "") == decoded


@pytest.mark.parametrize("family", TOKENIZERS, ids=lambda family: family.tokenizer)
def test_tokens_have_their_own_space(family: Family) -> None:
    tokenizer = Tokenizer(families.hugging_face(family), family.name)
    token_ids = tokenizer.encode("Hello world")
    assert [tokenizer.token_text(token_id).strip() for token_id in token_ids] == ["Hello", "world"]
    assert tokenizer.token_text(token_ids[1]) == " world"
    for end in family.ends:
        (token_id,) = tokenizer.encode(end)
        assert tokenizer.token_text(token_id) == end


@pytest.mark.parametrize("family", TOKENIZERS, ids=lambda family: family.tokenizer)
@pytest.mark.parametrize("text", ["Hello world", "f(x) =", "naïve 🙂", "1. One\n2."])
def test_the_text_of_a_completion_continues_its_prompt(family: Family, text: str) -> None:
    """As the streams of the package tokenizers decode it, which vLLM 0.32 uses."""
    hugging_face = families.hugging_face(family)
    before_ids = hugging_face(text, add_special_tokens=False)["input_ids"]
    token_ids = hugging_face(f"{text} Paris it is, 東京 🙂.", add_special_tokens=False)["input_ids"][len(before_ids) :]
    decoder = DecodeStream(ids=before_ids, skip_special_tokens=True)
    expected = "".join(decoder.step(hugging_face._tokenizer, token_id) or "" for token_id in token_ids)
    assert expected == " Paris it is, 東京 🙂."
    stream = TextStream(Tokenizer(hugging_face, family.name), before_ids=before_ids)
    assert "".join([*(stream.push([token_id]) for token_id in token_ids), stream.finish()]) == expected
