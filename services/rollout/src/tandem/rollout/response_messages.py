"""Messages of responses, as environments get them: the answer, the reasoning, calls, the whole text.

Only for models whose chat template writes markers of reasoning, channels or tool calls. Any other response is its text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.common.returned import sayable

if TYPE_CHECKING:
    from tandem.samples.responses import ResponseParser
    from tandem.samples.tokenizer import Tokenizer
    from tandem.samples.tool_formats import FunctionCall

NUM_BEFORE = 32
"""Tokens before a response in which a marker may open its reasoning."""


class ResponseMessages:
    """Messages of one model's responses."""

    def __init__(self, tokenizer: Tokenizer, parser: ResponseParser) -> None:
        self._tokenizer = tokenizer
        self._parser = parser

    def message(self, before: Sequence[int], token_ids: Sequence[int]) -> dict[str, Any]:
        """Return a response as a message, by the tokens before it and its own.

        `content` is the text after all reasoning, in the last channel; before calls of tools it is all text. The keys
        `reasoning_content`, `tool_calls` (as in OpenAI's API) and `text` are there if there is any. `text` is all that
        was generated, with its markers, after the marker of reasoning with which the prompt ends, if it does.
        """
        prompt = self._tokenizer.decode(before[-NUM_BEFORE:], skip_special_tokens=False)
        generated = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        parsed = self._parser.parse(generated, prompt=prompt)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parsed.content if parsed.tool_calls else parsed.answer,
        }
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [*map(_tool_call, parsed.tool_calls)]
        text = self._parser.markers.find_opened_reasoning(prompt) + self._parser.visible(generated)
        if text != message["content"]:
            message["text"] = text
        return message


def response_messages(tokenizer: Tokenizer) -> ResponseMessages | None:
    """Return how to read responses of a model; None if they are nothing but text."""
    if not tokenizer.has_chat_template:
        return None
    from tandem.samples.responses import ResponseParser

    parser = ResponseParser.of(tokenizer)
    return ResponseMessages(tokenizer, parser) if parser.reads_markers else None


def _tool_call(call: FunctionCall) -> dict[str, Any]:
    # A policy may call anything with anything: arguments as JSON in ASCII can be sent whatever they are.
    function = {"name": sayable(call.name), "arguments": json.dumps(call.arguments)}
    return {"type": "function", "function": function}
