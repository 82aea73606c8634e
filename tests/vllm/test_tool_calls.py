"""Calls of DeepSeek V3.2, V4 and V4.1, as DeepSeek's own encoders in vLLM 0.32 write them."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
from vllm.tokenizers import deepseek_v4_encoding, deepseek_v32_encoding, deepseek_v41_encoding

from tandem.samples.responses import ResponseMarkers, ResponseParser

ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Paris", "days": 3, "units": ["C", "F"], "note": "7", "is_brief": True, "more": {"a": None, "b": 1.5}},
    {"text": ' "quoted" </｜DSML｜invoke>\n<tool_call> '},
    {},
]
ENCODINGS = [deepseek_v32_encoding, deepseek_v4_encoding, deepseek_v41_encoding]
REASONING = ("reasoning", "reasoning_content")
"""Names of its field, of which each encoder knows one."""
QUESTION = {"role": "user", "content": "What is the weather?"}


@pytest.mark.parametrize("encoding", ENCODINGS, ids=["v32", "v4", "v41"])
@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_calls_are_read_as_deepseek_writes_them(encoding: ModuleType, num_calls: int) -> None:
    functions = [{"name": "get_weather", "arguments": json.dumps(each)} for each in ARGUMENTS[:num_calls]]
    calls = [{"id": str(place), "type": "function", "function": each} for place, each in enumerate(functions)]
    message = {"role": "assistant", "content": "I look.", "tool_calls": calls} | dict.fromkeys(REASONING, "Hm.")
    prompt = encoding.encode_messages([QUESTION], thinking_mode="thinking")
    response = encoding.encode_messages([QUESTION, message], thinking_mode="thinking").removeprefix(prompt)
    parser = ResponseParser(
        ResponseMarkers.of_template("<think></think>｜DSML｜"),
        prompt=prompt,
        special_tokens=("<｜end▁of▁sentence｜>", "｜DSML｜", "<think>", "</think>"),
    )
    parsed = parser.parse(response)
    assert (parsed.reasoning, parsed.content) == ("Hm.", "I look.")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
        ("get_weather", each) for each in ARGUMENTS[:num_calls]
    ]
