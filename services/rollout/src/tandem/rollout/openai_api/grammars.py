"""Responses in JSON: a schema as a grammar, which tells what may come next (llguidance)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
from numpy.typing import NDArray

from tandem.rollout.openai_api.refusals import Refused
from tandem.samples.tokenizer import Tokenizer

FIELD = "response_format"


class JsonGrammar:
    """The grammar of a schema's JSON."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, schema: Mapping[str, Any]) -> None:
        """Compile the grammar. Raises `Refused` if the schema is invalid, or if this tokenizer cannot write it."""
        self._tokenizer = tokenizer
        # With free white space a model could go on with spaces for ever.
        spaces: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        self._grammar = llguidance.LLMatcher.grammar_from_json_schema(dict(schema), spaces)
        first = self.begin()
        if first.error:
            raise Refused(f"{FIELD}.json_schema: {first.error}", param=FIELD)
        if first.allowed_V(tokenizer.vocab_size).nonzero()[0].tolist() in ([], [tokenizer.eos_token]):
            raise Refused(f"{FIELD}: the tokens of this model cannot write what it asks for", param=FIELD)

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


def grammar_tokenizer(tokenizer: Tokenizer, vocabulary: int) -> llguidance.LLTokenizer:
    """Return the tokenizer as grammars need it. Raises `Refused` if its tokens have no bytes."""
    try:
        return llguidance.hf.from_tokenizer(tokenizer.hugging_face, n_vocab=vocabulary)
    except ValueError as error:
        what = f"{FIELD}: this model's tokenizer does not say which bytes its tokens are: {str(error)[:200]}"
        raise Refused(what, param=FIELD, code="unsupported") from error
