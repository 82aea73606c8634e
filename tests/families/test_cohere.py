"""Cohere's responses, as Cohere's own package writes and reads them: cohere-melody 0.15.3, on which vLLM's parsers are
built."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from tandem.samples.responses import ResponseMarkers, ResponseParser
from tests.harness.family_responses import ARGUMENTS, PARAMETERS, REASONING

TURN = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
TOOLS = [{"name": "get_weather", "description": "Tell it.", "parameters": PARAMETERS}]
CALLS = [
    {"id": "0", "name": "get_weather", "parameters": json.dumps(ARGUMENTS)},
    {"id": "1", "name": "get_weather", "parameters": json.dumps({"city": 'a "quoted" <|END_ACTION|>\n'})},
    {"id": "2", "name": "get_weather", "parameters": "{}"},
]


def written(command: str, message: dict[str, Any]) -> str:
    """Return a response as the renderer of a generation of models writes it."""
    question = {"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]}
    messages = [question, {"role": "chatbot", **message}]
    render = getattr(importlib.import_module("cohere_melody"), f"render_{command}")
    text: str = render({"messages": messages, "dev_instruction": "", "available_tools": TOOLS})
    turns = text.removesuffix(TURN).rstrip().removesuffix("<|END_OF_TURN_TOKEN|>").split(TURN)
    return turns[-1]


def read_by_melody(command: str, response: str) -> Any:
    """Return what Cohere's own reader makes of a response."""
    melody = importlib.import_module("cohere_melody")
    options = getattr(melody.PyFilterOptions(), command)()
    return melody.PyFilter(options).process_full_text(response)


@pytest.mark.parametrize("command", ["cmd3", "cmd4"])
@pytest.mark.parametrize("num_calls", [0, 1, 3])
def test_responses_are_read_as_cohere_reads_them(command: str, num_calls: int) -> None:
    thinking = {"type": "thinking", "thinking": REASONING}
    fine = [] if num_calls else [{"type": "text", "text": "Fine."}]
    response = written(command, {"content": [thinking, *fine], "tool_calls": CALLS[:num_calls]})
    assert REASONING in response
    markers = ResponseMarkers.of_template(f"<|START_ACTION|>{response}")
    parsed = ResponseParser(markers).parse(response)
    assert (parsed.reasoning, parsed.content) == (REASONING, "" if num_calls else "Fine.")
    assert [(call.id, call.name, call.arguments) for call in parsed.tool_calls] == [
        (call["id"], call["name"], json.loads(call["parameters"])) for call in CALLS[:num_calls]
    ]
    if num_calls < 3:  # its reader ends a call at a marker within a text
        expected = read_by_melody(command, response)
        assert (parsed.reasoning, parsed.content) == (expected.reasoning, expected.content or "")
        assert [(call.id, call.name, call.arguments) for call in parsed.tool_calls] == [
            (call.id, call.name, json.loads(call.arguments)) for call in expected.tool_calls
        ]
