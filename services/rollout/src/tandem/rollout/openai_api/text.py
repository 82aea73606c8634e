"""Text of a response while its tokens come: whole characters, no stop strings, reasoning, tool calls.

A call is shown once it is complete, so a stream has exactly the calls of the whole answer. Text that resembles a call
but is none stays text. White space beside calls is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tandem.rollout.openai_api.protocol import CalledFunction, ToolCall
from tandem.samples.responses import ResponseDelta, ResponseMarkers, ResponseStream, beginning
from tandem.samples.tokenizer import Tokenizer

_HALF = "\N{REPLACEMENT CHARACTER}"
"""Output of a decoder for bytes that are not a character, or not yet."""
_MAX_HELD = 16
"""Tokens after which what looks like half a character no longer waits for its other half."""
_MAX_WINDOW = 64
"""Tokens decoded together if most of them have no text, such as special ones."""


class ChatPart(NamedTuple):
    """The next certain texts and calls of a response."""

    text: str
    reasoning: str
    tool_calls: list[ToolCall]


class ChatReader:
    """The text, the reasoning and the calls of one response; each call gets an id by which its result is sent back."""

    def __init__(
        self,
        markers: ResponseMarkers,
        key: str,
        *,
        prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        call_limit: int | None = None,
    ) -> None:
        """Begin an empty response to a prompt, of which the end is enough.

        `key` distinguishes it from all others, of any conversation, and `tools` are those on offer. Calls after the
        first `call_limit` are left out, as vLLM leaves out all but the first without ``parallel_tool_calls``.
        """
        self._stream = ResponseStream(markers.reader(prompt, tools))
        self._key = key
        self._num_calls = 0
        self._call_limit = call_limit

    @property
    def has_calls(self) -> bool:
        """Whether a tool has been called."""
        return self._num_calls > 0

    def push(self, text: str) -> ChatPart:
        """Add text; return what is certain now."""
        return self._part(self._stream.push(text))

    def finish(self) -> ChatPart:
        """Return what was held back."""
        return self._part(self._stream.finish())

    def _part(self, delta: ResponseDelta) -> ChatPart:
        calls = []
        for call in delta.tool_calls:
            if self._call_limit is not None and self._num_calls >= self._call_limit:
                continue
            arguments = msgspec.json.encode(call.arguments).decode()
            function = CalledFunction(name=call.name, arguments=arguments)
            calls.append(ToolCall(id=self._next_id(call.id), function=function))
        return ChatPart(delta.content, delta.reasoning, calls)

    def _next_id(self, template_id: str) -> str:
        """Return the id of the next call: its own if its family's template writes ids, as Kimi's does."""
        self._num_calls += 1
        if template_id:
            return template_id
        return f"call_{hashlib.blake2b(f'{self._key}/call {self._num_calls}'.encode(), digest_size=12).hexdigest()}"


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
