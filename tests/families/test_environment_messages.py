"""What environments get of responses of real families: the answer, the reasoning before it, the whole text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.common.messages import Problem
from tandem.config import build_config
from tandem.rollout.environments import Environment, make_environment
from tandem.rollout.generating import ResponseMessages, response_messages
from tandem.samples.tokenizer import Tokenizer
from tests.harness import families
from tests.harness.families import NO_CALLS, Family

QUESTION = [{"role": "user", "content": "2+2?"}]
REASONING = "Is it 5? No: it is one less."


def environment(name: str) -> Any:
    source = {"dataset_name": "jsonl", "train_data_path": "train.jsonl"}
    return make_environment(
        build_config({"grpo": {}, "policy": {"model_name": "model"}, "data": source, "env": {name: {}}})
    )


def message_of(
    family: Family, answer: dict[str, Any], tools: list[dict[str, Any]] | None = None
) -> tuple[dict[str, Any], str]:
    """Return the message of a response as the family's template writes it, and its text."""
    hugging_face = families.hugging_face(family)
    whole = hugging_face.apply_chat_template(families.as_read(family, [*QUESTION, answer]), tokenize=False)
    question = families.as_read(family, QUESTION)
    prompt = hugging_face.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    while not whole.startswith(prompt):  # reasoning that a template opens in a prompt, and leaves out of history
        prompt = prompt[:-1]
    response = whole[len(prompt) :]
    tokenizer = Tokenizer(hugging_face, family.name)
    ids = [hugging_face(text, add_special_tokens=False)["input_ids"] for text in (prompt, response)]
    messages = response_messages(tokenizer)
    if messages is None:
        return {"role": "assistant", "content": tokenizer.decode(ids[1])}, response
    assert isinstance(messages, ResponseMessages)
    return messages.message(*ids, tools or ()), response


def test_the_answer_of_every_family_is_right(family: Family) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": REASONING, "thinking": REASONING}
    message, response = message_of(family, answer)
    assert message["content"].strip() == "4"
    assert ("reasoning_content" in message) == (REASONING in response)
    if REASONING in response:
        assert message["reasoning_content"] == REASONING
        assert REASONING in message["text"]
    problem = Problem(problem_id="p", question="2+2?", answer="4", metadata={})
    for name in ("exact_match", "math"):
        scorer: Environment = environment(name)
        assert scorer.score(problem, message["content"]).correct


def test_calls_are_apart_and_their_text_is_kept(family: Family) -> None:
    if family.name in NO_CALLS:
        pytest.skip("the template writes no calls")
    arguments = '{"a": 2}' if family.name == "deepseekv3" else {"a": 2}
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    message, _ = message_of(family, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
    assert "add" in message["text"]
    assert "add" not in message["content"]


def test_arguments_have_the_types_of_the_rows_tools(family: Family) -> None:
    """A text of digits stays one where the schema says so; what writes arguments as JSON has no need of it."""
    if family.name in NO_CALLS or family.name == "deepseekv3":
        pytest.skip("the template writes no calls, or no objects")
    properties = {"room": {"type": "string", "description": "It"}, "floor": {"type": "integer", "description": "It"}}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "book", "description": "It", "parameters": parameters}}
    arguments = {"room": "12", "floor": 3}
    call = {"id": "functions.book:0", "type": "function", "function": {"name": "book", "arguments": arguments}}
    message, _ = message_of(family, {"role": "assistant", "content": "", "tool_calls": [call]}, [tool])
    (made,) = message["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == arguments
