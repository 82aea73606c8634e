"""The bytes and texts of tokens of real tokenizers: joined, they are what Transformers decodes."""

from __future__ import annotations

import pytest

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
