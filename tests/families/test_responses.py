"""Responses of real templates: read as Transformers 5.24 reads them by the response templates of TRL 1.16."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tandem.samples.responses import ResponseParser
from tandem.samples.tokenizer import Tokenizer
from tests.harness import families
from tests.harness.families import Family
from tests.harness.family_responses import ARGUMENTS, CALL, NO_CALLS, QUESTION, REASONING, TOOL, rendered


def by_transformers(family: Family, prefix: str, response: str, tools: list[Any]) -> dict[str, Any] | None:
    """Return what Transformers reads by TRL's response template; None for families that TRL has none of."""
    add_response_schema = importlib.import_module("trl.chat_template_utils").add_response_schema
    hugging_face = families.hugging_face(family)
    try:
        add_response_schema(hugging_face)
        parsed: dict[str, Any] = hugging_face.parse_response(response, prefix=prefix, tools=tools)
    except ValueError:
        return None
    finally:
        hugging_face.response_template = None
    return parsed


def test_the_answer_is_read_as_transformers_reads_it(family: Family) -> None:
    message = {"role": "assistant", "content": "Fine.", "reasoning_content": REASONING, "thinking": REASONING}
    prefix, response = rendered(family, message)
    parsed = ResponseParser.of(Tokenizer(families.hugging_face(family), family.name)).parse(response, prompt=prefix)
    assert parsed.answer.strip() == "Fine."
    assert parsed.reasoning == (REASONING if REASONING in response else None)
    expected = by_transformers(family, prefix, response, [])
    if expected is not None and family.name != "deepseek_r1_distill":  # TRL's reads the prompt as content
        assert parsed.content.strip() == expected["content"]
        assert parsed.reasoning == expected.get("reasoning_content", expected.get("thinking"))


def test_calls_are_read_as_transformers_reads_them(family: Family) -> None:
    if family.name in NO_CALLS:
        pytest.skip("the template writes no calls")
    is_text = family.name == "deepseekv3"  # its template takes arguments as JSON
    arguments = '{"city": "Paris", "days": 3}' if is_text else ARGUMENTS
    call = CALL | {"function": {"name": "get_weather", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    prefix, response = rendered(family, message, tools=[TOOL])
    parser = ResponseParser.of(Tokenizer(families.hugging_face(family), family.name))
    parsed = parser.parse(response, prompt=prefix, tools=[TOOL])
    (read,) = parsed.tool_calls
    assert (read.name, read.arguments) == ("get_weather", {"city": "Paris", "days": 3} if is_text else ARGUMENTS)
    assert (parsed.content, parsed.malformed_calls) == ("", ())
    expected = by_transformers(family, prefix, response, [TOOL])
    if expected is not None:
        (function,) = [one["function"] for one in expected["tool_calls"]]
        assert (read.name, read.arguments) == (function["name"], function["arguments"])


def test_a_response_begins_within_reasoning_where_the_prompt_opens_it(family: Family) -> None:
    tokenizer = families.hugging_face(family)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    parsed = ResponseParser.of(Tokenizer(tokenizer, family.name)).parse("Fine.")
    assert parsed.is_reasoning_closed == (not prompt.rstrip().endswith("<think>"))
    assert parsed.answer == ("Fine." if parsed.is_reasoning_closed else "")
