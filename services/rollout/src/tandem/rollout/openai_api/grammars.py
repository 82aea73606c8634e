"""Responses in JSON: a schema as a grammar, which tells what may come next (llguidance)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
from numpy.typing import NDArray

from tandem.rollout.openai_api.refusals import OpenAIRefused
from tandem.samples.tokenizer import Tokenizer

FIELD = "response_format"
CANNOT_WRITE = "the tokens of this model cannot write what it asks for"
_SCALARS = ("boolean", "integer", "null", "number")


class JsonGrammar:
    """The grammar of a schema's JSON."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, schema: Mapping[str, Any]) -> None:
        """Compile the grammar. Raises `OpenAIRefused` if the schema is invalid, or the tokenizer cannot write it."""
        self._tokenizer = tokenizer
        # With free white space a model could go on with spaces for ever.
        spaces: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        self._grammar = llguidance.LLMatcher.grammar_from_json_schema(dict(schema), spaces)
        first = self.begin()
        if first.error:
            raise OpenAIRefused(f"{FIELD}.json_schema: {first.error}", param=FIELD)
        if first.allowed_V(tokenizer.vocab_size).nonzero()[0].tolist() in ([], [tokenizer.eos_token]):
            raise OpenAIRefused(f"{FIELD}: {CANNOT_WRITE}", param=FIELD)

    def begin(self) -> JsonMatcher:
        """Return a matcher for an empty response."""
        return JsonMatcher(llguidance.LLMatcher(self._tokenizer, self._grammar), self._tokenizer.eos_token)


class JsonMatcher:
    """The state of a response within the grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_id: int) -> None:
        self._matcher = matcher
        self._eos_id = eos_id

    @property
    def error(self) -> str:
        """The grammar's error in one line; empty if it is valid."""
        return self._matcher.get_error().splitlines()[0][:500] if self._matcher.is_error() else ""

    def take(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens of the response."""
        if token_ids and not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(token_ids))

    def allowed_V(self, num_tokens: int) -> NDArray[np.bool_]:
        """Return, for each token of the vocabulary, whether it may come next; only the end may where nothing else
        can."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed_V = np.zeros(num_tokens, np.bool_)
        allowed_V[: len(bits)] = bits[:num_tokens]
        allowed_V[self._eos_id] |= not allowed_V.any()
        return allowed_V


class _Characters:
    """A character-level tokenizer in the form that llguidance takes."""

    def __init__(self, tokenizer: Tokenizer, alphabet: Collection[str], vocabulary: int) -> None:
        self._ids = ids = {each: int(tokenizer.hugging_face.convert_tokens_to_ids(each)) for each in sorted(alphabet)}
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [b""] * vocabulary
        for character, token_id in ids.items():
            self.tokens[token_id] = character.encode()
        self.special_token_ids = sorted({*range(vocabulary)} - {*ids.values()})

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text's beginning, as far as it has tokens. Raises `TypeError` for bytes."""
        if not isinstance(text, str):
            raise TypeError("llguidance asks whether bytes are taken by trying")
        return [self._ids[character] for character in itertools.takewhile(self._ids.__contains__, text)]


def check_characters(alphabet: Collection[str] | None, schema: Mapping[str, Any]) -> None:
    """Raise `OpenAIRefused` if a character-level tokenizer, of this alphabet, lacks what a schema's JSON is made of."""
    if alphabet is None or schema.get("type") in _SCALARS:
        return
    needed = "[]," if schema.get("type") == "array" else '{}":, ' + "".join(schema.get("required", ()))
    missing = [character for character in dict.fromkeys(needed) if character not in alphabet]
    if missing:
        names = " or ".join(map(repr, missing))
        message = f"{FIELD}: {CANNOT_WRITE}: each is a character, and there is none for {names}"
        raise OpenAIRefused(message, param=FIELD, code="unsupported")


def grammar_tokenizer(tokenizer: Tokenizer, vocabulary: int) -> llguidance.LLTokenizer:
    """Return the tokenizer as grammars need it. Raises `OpenAIRefused` if its tokens have no bytes."""
    if tokenizer.alphabet is not None:
        characters = _Characters(tokenizer, tokenizer.alphabet, vocabulary)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(characters), n_vocab=vocabulary)
    try:
        return llguidance.hf.from_tokenizer(tokenizer.hugging_face, n_vocab=vocabulary)
    except ValueError as error:
        message = (
            f"{FIELD}: this model's tokenizer does not say which bytes its tokens are (llguidance: {str(error)[:200]})"
        )
        raise OpenAIRefused(message, param=FIELD, code="unsupported") from error
