"""What environments get of responses of real families: the answer, the reasoning before it, the whole text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.common.messages import Problem
from tandem.config import build_config
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.rollout.environments import Environment, make_environment
from tandem.rollout.generating import ResponseMessages, response_messages, shown_tools
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


def booking(**types: str) -> dict[str, Any]:
    """Return a tool whose arguments have these types."""
    properties = {name: {"type": kind, "description": "It"} for name, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "book", "description": "It", "parameters": parameters}}


def arguments_of(family: Family, arguments: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of a call, as the family's template writes it and an environment gets it."""
    call = {"id": "functions.book:0", "type": "function", "function": {"name": "book", "arguments": arguments}}
    message, _ = message_of(family, {"role": "assistant", "content": "", "tool_calls": [call]}, tools)
    (call,) = message["tool_calls"]
    read_arguments: dict[str, Any] = json.loads(call["function"]["arguments"])
    return read_arguments


def test_arguments_have_the_types_of_the_rows_tools(family: Family) -> None:
    """A text of digits stays one where the schema says so; what writes arguments as JSON has no need of it."""
    if family.name in NO_CALLS or family.name == "deepseekv3":
        pytest.skip("the template writes no calls, or no objects")
    arguments = {"room": "12", "floor": 3}
    assert arguments_of(family, arguments, [booking(room="string", floor="integer")]) == arguments


def test_tools_are_those_of_the_data_set_of_the_row(family: Family, tmp_path: Path) -> None:
    """Rows of two data sets, each with its own `tool_key`, have both fields; prompts show the set's own."""
    if family.name in NO_CALLS or family.name == "deepseekv3":
        pytest.skip("the template writes no calls, or no objects")
    texts, numbers = booking(room="string", floor="string"), booking(room="integer", floor="integer")
    for name in ("first", "second", "third"):
        row = {"input": f"Book the {name}.", "output": "Done.", "texts": [texts], "numbers": json.dumps([numbers])}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")

    def data_set(name: str, **keys: str) -> dict[str, str]:
        return {"data_path": str(tmp_path / f"{name}.jsonl"), "dataset_name": "ResponseDataset", **keys}

    config = build_config(
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_val_samples": 1},
            "policy": {
                "model_name": str(families.folder(family)),
                "train_global_batch_size": 4,
                "max_total_sequence_length": 2048,
            },
            "data": {
                "train": [data_set("first", tool_key="texts"), data_set("second", tool_key="numbers")],
                "validation": data_set("third", tool_key="numbers"),
                "default": {"env_name": "exact_match"},
                "shuffle": False,
                "max_input_seq_length": 2000,
            },
            "env": {"exact_match": {}},
        }
    )
    algorithm = GrpoAlgorithm(config, Tokenizer(families.hugging_face(family), str(families.folder(family))))
    groups = [*algorithm.prompt_groups(1, "train", [0, 1]), *algorithm.prompt_groups(1, "validate", [0])]
    by_name = {str(group.problem.question).split()[-1]: group for group in groups}
    for name, tool, arguments in (
        ("first.", texts, {"room": "12", "floor": "3"}),
        ("second.", numbers, {"room": 12, "floor": 3}),
        ("third.", numbers, {"room": 12, "floor": 3}),
    ):
        assert [*shown_tools(by_name[name])] == [tool]
        assert arguments_of(family, arguments, [*shown_tools(by_name[name])]) == arguments
