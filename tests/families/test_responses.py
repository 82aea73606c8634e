"""Responses of real templates: read as Transformers 5.24 reads them by the response templates of TRL 1.16."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import pytest

from tandem.samples.responses import ResponseParser, ResponseStream
from tandem.samples.tokenizer import Tokenizer
from tandem.trainer.scorers.turn_penalties import FlawFinder
from tests.harness import families
from tests.harness.families import NO_CALLS, Family
from tests.harness.family_responses import ARGUMENTS, CALL, PARAMETERS, QUESTION, REASONING, TOOL, rendered


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


VALUES: dict[str, list[dict[str, Any]]] = {
    "two": [{"city": "Paris", "days": 3}, {"city": "Rome", "days": 2}],
    "no arguments": [{}],
    "nested": [{"units": [1, "2", {"a": []}], "place": {"names": ["a", "b"], "deep": {"x": None, "y": True}}}],
    "texts like numbers": [{"note": "7", "city": "", "days": -1}],
    "markers in a text": [{"city": "say </tool_call> and <tool_call>, then {x: [1]}"}],
    "null": [{"city": "Paris", "days": None}],
    "quotes": [{"city": 'it\'s "fine"', "note": "x='1' AND y=\"2\""}],
    "lines and backslashes": [{"city": "a\nb\tc", "note": r"\frac{1}{2} C:\new", "days": 7}],
    "code": [{"note": "print('a', \"b\")\nif x:\n    y(1)"}],
    "names": [{"from": "Paris", "place": {"a b": [{'c "d"': "it's"}]}, "days": -3}],
}
ONE_CALL = ("gptoss", "llama3_1", "llama3_2")
"""Families whose templates write the first call of a turn alone, or refuse others."""


@pytest.mark.parametrize("name", VALUES)
def test_calls_with_any_values_are_read_whole_and_as_they_come(family: Family, name: str) -> None:
    """The arguments that were written are read: where Transformers differs, it loses what a value holds."""
    values = VALUES[name]
    if family.name in NO_CALLS or (family.name in ONE_CALL and len(values) > 1):
        pytest.skip("the template writes no such calls")
    parameters = {
        **PARAMETERS,
        "properties": {**PARAMETERS["properties"], "place": {"type": "object"}, "from": {"type": "string"}},
    }
    parameters["properties"]["days"] = {"type": ["integer", "null"]}
    tool = {**TOOL, "function": {**TOOL["function"], "parameters": parameters}}
    takes_text = family.name == "deepseekv3"
    calls = [
        {
            "id": f"functions.get_weather:{number}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps(value) if takes_text else value},
        }
        for number, value in enumerate(values)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    prefix, response = rendered(family, message, tools=[tool])
    parser = ResponseParser.of(Tokenizer(families.hugging_face(family), family.name))
    parsed = parser.parse(response, prompt=prefix, tools=[tool])
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("get_weather", value) for value in values]
    assert parsed.content == ""
    stream = ResponseStream(parser.markers.reader(prefix, [tool]))
    deltas = [*map(stream.push, parser.visible(response)), stream.finish()]
    assert [call.arguments for delta in deltas for call in delta.tool_calls] == values
    assert "".join(delta.content for delta in deltas) == ""


def test_a_response_begins_within_reasoning_where_the_prompt_opens_it(family: Family) -> None:
    tokenizer = families.hugging_face(family)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    parsed = ResponseParser.of(Tokenizer(tokenizer, family.name)).parse("Fine.")
    assert parsed.is_reasoning_closed == (not prompt.rstrip().endswith("<think>"))
    assert parsed.answer == ("Fine." if parsed.is_reasoning_closed else "")


def test_a_call_within_thinking_is_none(family: Family) -> None:
    """Also where the family's template does not mark thinking: policies learn to write it all the same."""
    if family.name in NO_CALLS:
        pytest.skip("the template writes no calls")
    arguments = json.dumps(ARGUMENTS) if family.name == "deepseekv3" else ARGUMENTS
    message = {
        "role": "assistant",
        "tool_calls": [CALL | {"function": {"name": "get_weather", "arguments": arguments}}],
    }
    prefix, response = rendered(family, {**message, "content": ""}, tools=[TOOL])
    parser = ResponseParser.of(Tokenizer(families.hugging_face(family), family.name))
    begin, end = (*parser.markers.reasoning, ("<think>", "</think>"))[0]
    call = response.rpartition(end)[2]
    if parser.markers.messages is not None:  # thinking is a message of its own
        (begin, end) = {
            "gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            "muse_glimmer": (" to=self<|message|>", "<|eom|><|start|>assistant"),
        }[family.name]
        prefix, call = prefix.rpartition("<|start|>assistant")[0] + "<|start|>assistant", response
    for opened in ("", begin):
        prompt = prefix.removesuffix("\n").removesuffix(begin) + opened
        text = f"{begin.removeprefix(opened)}I could call <it>: "
        inside = call if parser.markers.messages is None else re.sub(r"<\|\w+\|>", " ", call)
        for thinking, expected in (
            (f"{text}{inside} or not.{end}", 0),
            (f"{text}{inside}", 0),
            (f"{text}{inside}{end}{call}", 1),
        ):
            parsed = parser.parse(thinking, prompt=prompt, tools=[TOOL])
            assert len(parsed.tool_calls) == expected, thinking
            stream = ResponseStream(parser.markers.reader(prompt, [TOOL]))
            deltas = [*map(stream.push, parser.visible(thinking)), stream.finish()]
            assert sum(len(delta.tool_calls) for delta in deltas) == expected, thinking


def test_an_answer_without_a_beginning_of_a_call_has_no_flaw(family: Family) -> None:
    tokenizer = Tokenizer(families.hugging_face(family), family.name)
    finder = FlawFinder(tokenizer, "auto")
    before = tokenizer.encode_chat(families.as_read(family, QUESTION), add_generation_prompt=True)
    header = {"gptoss": "<|channel|>final<|message|>", "muse_glimmer": " to=user<|message|>"}.get(family.name, "")
    for answer, is_flawed in (("So \\boxed{4} and [1, 2].", False), ("<tool_call>", True)):
        assert finder.find(before, tokenizer.encode(header + answer)).is_invalid_call == is_flawed
