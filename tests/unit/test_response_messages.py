"""What environments get of a response: the answer, or the whole text where they say so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engine_harness import make_model
from environment_harness import WAIT_S, config
from rollout_harness import CHARACTERS, TEMPLATE, Rollout

from tandem.common.errors import ConfigError
from tandem.common.messages import Problem, ResponseToScore
from tandem.config import build_config
from tandem.config.schema import NewModel
from tandem.coordinator.api.rewards import reward_functions
from tandem.rollout.environments import Score, Turn, make_environment
from tandem.rollout.environments.environment import read_whole_text
from tandem.rollout.environments.scorer import EnvironmentScorer
from tandem.rollout.generating import ResponseMessages, response_messages
from tandem.samples.model_files import load_tokenizer, write_new_model
from tandem.samples.tokenizer import Tokenizer

PLAIN = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
OPENED = PLAIN + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
CALLS = PLAIN + "{# <think> </think> <tool_call> </tool_call> #}"
PROBLEM = Problem(problem_id="p", question="6 * 7", answer="42", metadata={})


class SaysWhatItReads:
    """Counts the characters that it is given."""

    reads = "answer"

    def score(self, problem: Problem, response: str) -> Score:
        return Score(float(len(response)), correct=True, answer=response)


class ReadsText(SaysWhatItReads):
    reads = "text"


class ReadsThoughts(SaysWhatItReads):
    reads = "thoughts"


class TakesSteps:
    """Gives the keys of each message."""

    def step(self, problem: Problem, conversation: Any) -> Score | Turn:
        last = conversation[-1]
        return Score(float(len(last.get("tool_calls", ()))), correct=True, answer=" ".join(sorted(last)))


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    characters = "".join(map(chr, range(32, 127))) + "\n"
    if not (folder / "model").exists():
        write_new_model(folder / "model", NewModel(config={"model_type": "qwen3"}, characters=characters))
    policy = {"model_name": str(folder / "model"), "tokenizer": {"chat_template": template}}
    data = {"dataset_name": "reasoning_gym", "task": "chain_sum"}
    return load_tokenizer(build_config({"grpo": {}, "policy": policy, "data": data}))


def message(folder: Path, template: str, prompt: str, response: str) -> dict[str, Any]:
    tokenizer = tokenizer_of(folder, template)
    messages = response_messages(tokenizer)
    assert isinstance(messages, ResponseMessages)
    return messages.message(tokenizer.encode(prompt), tokenizer.encode(response))


def outcome(environment: str, *conversation: dict[str, Any]) -> Any:
    """Return what a custom or built-in environment makes of a conversation, called as in a run."""
    is_custom = environment[0].isupper()
    named = {"class": f"{__name__}.{environment}"} if is_custom else {}
    scorer = EnvironmentScorer(config("mine" if is_custom else environment, named))
    try:
        scorer.await_ready()
        scorer.submit(0, PROBLEM, conversation)
        deadline = time.monotonic() + WAIT_S
        while not (results := scorer.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        scorer.close()
    return results[0][1]


def test_a_template_without_markers_needs_no_reader(tmp_path: Path) -> None:
    assert response_messages(tokenizer_of(tmp_path, PLAIN)) is None


@pytest.mark.parametrize(
    ("template", "prompt", "response", "expected"),
    [
        (
            OPENED,
            "6 * 7\n<think>\n",
            "so 42</think>\n<answer>42</answer>",
            {
                "content": "<answer>42</answer>",
                "reasoning_content": "so 42",
                "text": "<think>\nso 42</think>\n<answer>42</answer>",
            },
        ),
        (OPENED, "?\n<think>\n", "so 4", {"content": "", "reasoning_content": "so 4", "text": "<think>\nso 4"}),
        (CALLS, "?\n", "42", {"content": "42"}),
        (CALLS, "?\n", " 42 \n", {"content": " 42 \n"}),
        (
            CALLS,
            "?\n",
            "<think>5?</think> 42",
            {"content": "42", "reasoning_content": "5?", "text": "<think>5?</think> 42"},
        ),
        (
            CALLS,
            "?\n",
            'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>',
            {
                "content": "Wait.",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": "</tool_call>"}'}}],
                "text": 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>',
            },
        ),
        (
            CALLS,
            "?\n",
            '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>42',
            {
                "content": "42",
                "reasoning_content": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
                "text": '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>42',
            },
        ),
    ],
)
def test_messages_of_responses(
    tmp_path: Path, template: str, prompt: str, response: str, expected: dict[str, Any]
) -> None:
    assert message(tmp_path, template, prompt, response) == {"role": "assistant", **expected}


def test_the_format_of_several_rewards_counts_reasoning_that_the_prompt_opened(tmp_path: Path) -> None:
    response = "6 * 7 is 42</think>\n<answer>42</answer>"
    opened = message(tmp_path, OPENED, "6 * 7\n<think>\n", response)
    assert outcome("math_multi_reward", opened).components == {"correctness": 1, "integer": 1, "format": 1}
    alone = {"role": "assistant", "content": response}
    assert outcome("math_multi_reward", alone).components == {"correctness": 1, "integer": 1, "format": 0}


@pytest.mark.parametrize("name", ["exact_match", "math"])
def test_built_in_environments_read_the_answer(tmp_path: Path, name: str) -> None:
    assert outcome(name, message(tmp_path, OPENED, "<think>\n", "is it 41?</think>42")).correct
    assert not outcome(name, message(tmp_path, OPENED, "<think>\n", "is it 42?</think>41")).correct
    assert not outcome(name, message(tmp_path, OPENED, "<think>\n", "it is 42")).correct


def test_custom_environments_read_the_answer_or_the_text(tmp_path: Path) -> None:
    given = message(tmp_path, OPENED, "<think>\n", "so</think>42")
    assert outcome("SaysWhatItReads", given).answer == "42"
    assert outcome("ReadsText", given).reward == len("<think>\nso</think>42")
    with pytest.raises(ConfigError, match=r"ReadsThoughts\.reads is 'thoughts', not 'answer' or 'text'$"):
        make_environment(config("mine", {"class": f"{__name__}.ReadsThoughts"}))


def test_steps_get_messages_with_all_that_they_have(tmp_path: Path) -> None:
    given = message(tmp_path, CALLS, "?\n", '<think>a</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    score = outcome("TakesSteps", given)
    assert (score.reward, score.answer) == (1.0, "content reasoning_content role text tool_calls")
    assert read_whole_text(given).startswith("<think>")


class ThinkingRollout(Rollout):
    """A rollout whose chat template opens reasoning, which a random model never ends."""

    template = TEMPLATE.replace("a: {% endif %}", "a: <think>\n{% endif %}{# </think> #}")

    def _make_model(self, folder: Path, **changes: Any) -> Any:
        characters = CHARACTERS + "<think>"
        write_new_model(folder / "model", NewModel(config={"model_type": "qwen3"}, characters=characters))
        return make_model("qwen3", folder / "model", vocab_size=len({*characters}) + 3, **changes)


def test_a_rollout_gives_its_environment_the_answer_and_keeps_the_text(tmp_path: Path) -> None:
    rollout = ThinkingRollout(tmp_path, "own_environments.Length")
    try:
        group = rollout.group(1, [1, 2])
        samples = rollout.run(group)
        texts = rollout.texts(group)
    finally:
        rollout.service.close()
    for (_, place), (sample, _) in samples.items():
        assert sample.response_length > 0
        assert sample.reward == 0, "the answer is empty, as the reasoning never ends"
        assert texts[1, place].startswith("<think>\n")
        assert len(texts[1, place]) >= len("<think>\n") + sample.response_length - 1


def test_functions_get_the_answer_and_completions_are_whole_as_in_trl() -> None:
    asked = ResponseToScore(number=1, problem=PROBLEM, response="42", text="<think>so</think>42")
    one, several = reward_functions([lambda response: 0.0, lambda completions: [0.0]], None)
    assert one.arguments([asked], None) == {"response": "42"}
    assert several.arguments([asked], None) == {"completions": ["<think>so</think>42"]}
