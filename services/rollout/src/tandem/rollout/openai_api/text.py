"""Text of a response while its tokens come: never half a character, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.samples.responses import beginning
from tandem.samples.tokenizer import Tokenizer

_HALF = "\N{REPLACEMENT CHARACTER}"
"""Output of a decoder for bytes that are not a character, or not yet."""
_MAX_HELD = 16
"""Tokens after which what looks like half a character no longer waits for its other half."""
_MAX_WINDOW = 64
"""Tokens decoded together if most of them have no text, such as special ones."""


class TextStream:
    """A decoder of one response, token by token.

    A token's text depends on the tokens before it. So each token is decoded together with all tokens since the text was
    last whole, and with one piece of text before those.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        before_ids: Sequence[int] = (),
    ) -> None:
        """Begin an empty response.

        `shown_ids` are special tokens that are shown even where others are not. `before_ids` are tokens of a text that
        the response continues: tokenizers of SentencePiece leave out the space before a text's first token.
        """
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._shown_ids = shown_ids
        self._window: list[int] = []
        self._num_before = 0
        """Tokens of the window that have their text returned already."""
        self._before = ""
        before = self._decode(before_ids)
        if before and not before.endswith(_HALF):
            self._window, self._num_before, self._before = [*before_ids], len(before_ids), before

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is complete now."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return the rest; a character cut in half is shown as such."""
        text = self._decode(self._window)[len(self._before) :]
        self._window, self._num_before, self._before = [], 0, ""
        return text

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_HALF) and len(self._window) - self._num_before < _MAX_HELD:
            return ""
        new = text[len(self._before) :]
        if new or len(self._window) > _MAX_WINDOW:
            del self._window[: self._num_before]
            self._before = self._decode(self._window)
        self._num_before = len(self._window)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special, kept_ids=self._shown_ids)


class StoppedText:
    """A filter that holds back a possible beginning of a stop string, and ends before the first stop string."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = stop_strings
        self._held = ""
        self.has_stopped = False

    def push(self, text: str) -> str:
        """Add text; return the part that can be shown now."""
        if self.has_stopped:
            return ""
        self._held += text
        stop_places = [at for stop in self._stop_strings if (at := self._held.find(stop)) >= 0]
        if stop_places:
            self.has_stopped = True
            shown, self._held = self._held[: min(stop_places)], ""
            return shown
        num_held = max((beginning(self._held, stop) for stop in self._stop_strings), default=0)
        shown = self._held[: len(self._held) - num_held]
        self._held = self._held[len(shown) :]
        return shown

    def finish(self) -> str:
        """Return what was held back, since no stop string has come of it."""
        shown, self._held = self._held, ""
        return shown
