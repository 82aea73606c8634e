"""Read chats' responses while their text comes: final text, reasoning, and calls of tools.

A call is shown once it is complete, so a stream has exactly the calls of the whole answer. Text that resembles a call
but is none stays text. White space beside calls is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tandem.rollout.openai_api.protocol import CalledFunction, ToolCall
from tandem.samples.responses import ResponseDelta, ResponseMarkers, ResponseStream


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
