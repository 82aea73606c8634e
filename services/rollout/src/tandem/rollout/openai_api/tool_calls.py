"""Read tool calls out of responses while their text comes, in the formats of models' training.

A call is shown once it is complete, so a stream has exactly the calls of the whole answer. Text that resembles a call
but is none stays text. White space beside calls is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tandem.config.schema.generation import ToolCallParser
from tandem.rollout.openai_api.protocol import CalledFunction, ToolCall
from tandem.rollout.openai_api.text import beginning

_DECODER = json.JSONDecoder()
Said = str | CalledFunction
"""Text or a call."""


class ToolReader(Protocol):
    """A parser that splits a response into texts and calls."""

    def push(self, text: str) -> list[Said]:
        """Add text; return what is certain now."""
        ...

    def finish(self) -> list[Said]:
        """Return what was held back."""
        ...


class _Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, anywhere; the end of the last may be missing."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Said]:
        self._held += text
        said: list[Said] = []
        while True:
            before, begin, call = self._held.partition(self.BEGIN)
            if not begin:
                num_held = beginning(before, self.BEGIN)
                shown = before[: len(before) - num_held]
                self._held = before[len(shown) :]
                return [*said, shown]
            body, end, rest = call.partition(self.END)
            said.append(before)
            self._held = begin + body + end
            if not end:
                return said
            said.append(_called(body, "arguments") or self._held)
            self._held = rest

    def finish(self) -> list[Said]:
        body = self._held.removeprefix(self.BEGIN)
        call = None if body == self._held else _called(body, "arguments")
        return [call or self._held]


class _Llama3Json:
    """``{"name": ..., "parameters": {...}}``, or several with ``;`` between, and nothing else but a tag before them."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Said]:
        self._held += text
        begun = self._held.lstrip()
        self._is_text |= not (begun.startswith(("{", self.TAG)) or self.TAG.startswith(begun))
        if not self._is_text:
            return []
        shown, self._held = self._held, ""
        return [shown]

    def finish(self) -> list[Said]:
        bodies = self._held.strip().removeprefix(self.TAG)
        calls: list[Said] = []
        while bodies:
            size = _object_size(bodies)
            call = _called(bodies[:size], "parameters", "arguments")
            if call is None:
                return [self._held]
            calls.append(call)
            bodies = bodies[size:].lstrip("; \n\t")
        return calls or [self._held]


READERS: Mapping[ToolCallParser, Callable[[], ToolReader]] = {"hermes": _Hermes, "llama3_json": _Llama3Json}
"""Parsers by vLLM's names for them."""
MARKERS: Mapping[ToolCallParser, Sequence[str]] = {
    "hermes": (_Hermes.BEGIN, _Hermes.END),
    "llama3_json": (_Llama3Json.TAG,),
}
"""Strings that mark calls; they stay in the text even if they are special tokens."""


class ToolCalls:
    """The text and the calls of one response; each call gets an id by which its result is sent back."""

    def __init__(self, parser: ToolCallParser, key: str) -> None:
        """Begin an empty response; `key` distinguishes it from all others, of any conversation."""
        self._reader = READERS[parser]()
        self._key = key
        self._num_calls = 0
        self._blank = ""
        """White space that a call may follow."""

    @property
    def has_calls(self) -> bool:
        """Whether a tool has been called."""
        return self._num_calls > 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; return the text and the calls that are certain now."""
        return self._taken(self._reader.push(text))

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return what was held back."""
        text, calls = self._taken(self._reader.finish())
        return text if self.has_calls else text + self._blank, calls

    def _taken(self, said: Sequence[Said]) -> tuple[str, list[ToolCall]]:
        text, calls = "", list[ToolCall]()
        for part in said:
            if isinstance(part, CalledFunction):
                self._blank = ""
                calls.append(ToolCall(id=self._next_id(), function=part))
                continue
            whole = self._blank + part
            shown = whole.rstrip()
            self._blank = whole[len(shown) :]
            text += shown
        return text, calls

    def _next_id(self) -> str:
        self._num_calls += 1
        return f"call_{hashlib.blake2b(f'{self._key}/call {self._num_calls}'.encode(), digest_size=12).hexdigest()}"


def _called(body: str, *names: str) -> CalledFunction | None:
    """Read a call with its arguments under one of these names; return None if it is none."""
    try:
        said = msgspec.json.decode(body.strip(), type=dict[str, Any])
        name, arguments = said["name"], next(said[each] for each in names if each in said)
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return None
        return CalledFunction(name=name, arguments=msgspec.json.encode(arguments).decode())
    except (msgspec.MsgspecError, LookupError, StopIteration, RecursionError, UnicodeError):
        return None


def _object_size(text: str) -> int:
    """Return the length of the JSON at the beginning of a text; the whole length if there is none."""
    try:
        return _DECODER.raw_decode(text)[1]
    except (ValueError, RecursionError):
        return len(text)
