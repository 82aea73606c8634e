"""Penalties of agents' turns: the flaws that NeMo-RL and NeMo Gym find, and the advantages that it writes.

The reference is written from NeMo-RL's main branch of November 2026 (``nemo_rl/environments/nemo_gym.py`` and
``nemo_rl/algorithms/grpo.py``), from nemo-gym 0.4.0 (``nemo_gym/responses_converter.py``), and from vLLM's parsers of
reasoning ``deepseek_r1`` and ``qwen3``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_harness import character_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.errors import ConfigError
from tandem.config import Config, build_config
from tandem.samples.batch import SampleBatch
from tandem.samples.model_files import load_tokenizer
from tandem.trainer.advantages import ScoredShard
from tandem.trainer.scorers.turn_penalties import (
    CALL_PATTERNS,
    THINKING_TAGS,
    FlawFinder,
    TurnFlaws,
    divide_turn,
    flaws_of,
    penalise,
    turns_in,
)

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}{# <think></think><tool_call>\n</tool_call> #}"
)
LETTERS = "".join(sorted({*'<>/_ abcdefghijklmnopqrstuvwxyz\n"{}:,.0123456789'}))


def of_vllm(text: str, *, is_opened: bool) -> tuple[str | None, str | None]:
    """Reasoning and content of a response."""
    before, closed, after = text.partition("</think>")
    if not closed and not is_opened and not text.startswith("<think>"):
        return None, text
    reasoning = before.partition("<think>")[2] if "<think>" in before else before
    return reasoning or None, after or None


def of_nemo_gym(reasoning: str | None, content: str | None) -> dict[str, Any]:
    """The last output item of a response without calls."""
    wrapped = (f"<think>{reasoning}</think>" if reasoning else "") + (content or "")
    matches = re.findall(r"<think>(.*?)</think>", wrapped, re.DOTALL)
    rest = re.sub(r"<think>(.*?)</think>", "", wrapped, flags=re.DOTALL)
    if rest or not matches:
        return {"type": "message", "content": [{"text": rest}]}
    return {"type": "reasoning", "summary": [{"text": text} for text in matches]}


def of_nemo_rl(item: dict[str, Any]) -> tuple[bool, bool]:
    """The flags of an output item."""
    patterns = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
    if content := item.get("content"):
        text, most = content[0]["text"], 0
    elif item.get("type") == "reasoning":
        text, most = item["summary"][0]["text"], 1
    else:
        return False, False
    is_malformed = any(text.count(tag) > most for tag in ("<think>", "</think>"))
    return any(pattern in text for pattern in patterns), is_malformed


PIECES = ("<think>", "</think>", "<tool_call>", "</function_call>", "a", "\n")


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join), st.booleans())
def test_turns_have_the_flaws_that_nemo_rl_finds_behind_nemo_gym_and_vllm(text: str, is_opened: bool) -> None:
    if not is_opened and text.lstrip() != text:
        return  # vLLM's parsers disagree about blanks in front of the first tag
    expected = of_nemo_rl(of_nemo_gym(*of_vllm(text, is_opened=is_opened)))
    turn = divide_turn(text, *THINKING_TAGS, is_opened=is_opened)
    assert flaws_of(turn, CALL_PATTERNS, THINKING_TAGS) == expected


AGENT = {"mine": {"command": ["python", "agent.py"]}}


def config_of(grpo: dict[str, Any], env: dict[str, Any] = AGENT, **generation: Any) -> Config:
    return build_config(
        {
            "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, **grpo},
            "policy": {
                "model_name": "model",
                "train_global_batch_size": 2,
                "train_micro_batch_size": 1,
                "tokenizer": {"name": "model", "chat_template": TEMPLATE},
                "generation": {"tool_call_parser": "hermes", **generation},
            },
            "data": {"dataset_name": "gsm8k", "environment": next(iter(env))},
            "env": env,
        }
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    character_tokenizer(config_of({}), LETTERS)
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("hermes", 'use <tool_call>{"name": "f", "arguments": {}}</tool_call>', (False, False)),
        ("hermes", 'use <tool_call>{"name": "f", "arguments": ', (True, False)),
        ("hermes", "use <function_call>{}</function_call>", (True, False)),
        (None, 'use <tool_call>{"name": "f", "arguments": {}}</tool_call>', (True, False)),
        ("hermes", "<think>a</think>four", (False, False)),
        ("hermes", "a</think>four", (False, False)),
        ("hermes", "<think>a</think>four</think>", (False, True)),
        ("hermes", "<think>a</think>four <think>b", (False, True)),
        ("hermes", "<think>a <tool_call>", (True, False)),
        ("hermes", "<think>a<think>b<think>c", (False, True)),
        ("hermes", "<think>a</think>four</think><tool_call>", (True, True)),
        ("hermes", "four", (False, False)),
    ],
)
def test_flaws_are_found_in_tokens(parser: Any, text: str, expected: tuple[bool, bool]) -> None:
    config = config_of({}, tool_call_parser=parser)
    tokenizer = load_tokenizer(config)
    found = FlawFinder(tokenizer, parser).find(tokenizer.encode("<user>two<a>"), tokenizer.encode(text))
    assert found == TurnFlaws(*expected)


@pytest.mark.usefixtures("here")
def test_thinking_that_the_prompt_opens_is_thinking() -> None:
    tokenizer = load_tokenizer(config_of({}))
    finder, text = FlawFinder(tokenizer, "hermes"), tokenizer.encode("a<think>b<think>")
    assert finder.find(tokenizer.encode("<user>two<a><think>\n"), text) == (False, False), "after the last tag is b"
    assert finder.find(tokenizer.encode("<user>two<a>"), text) == (False, True)


def batch_of(config: Config, sequences: list[list[tuple[str, bool]]]) -> SampleBatch:
    """Sequences of texts, of which some were generated."""
    tokenizer = load_tokenizer(config)
    parts = [[(tokenizer.encode(text), is_made) for text, is_made in sequence] for sequence in sequences]
    lengths = [sum(len(token_ids) for token_ids, _ in sequence) for sequence in parts]
    flat = [(token, is_made) for sequence in parts for token_ids, is_made in sequence for token in token_ids]
    return SampleBatch(
        lengths_S=np.array(lengths, dtype=np.int32),
        token_ids_T=np.array([token for token, _ in flat], dtype=np.int32),
        loss_mask_T=np.array([is_made for _, is_made in flat], dtype=np.bool_),
        advantages_S=np.array([0.5, 10.0], dtype=np.float32),
    )


BAD_CALL, BAD_THOUGHT = "use <tool_call>", "<think>a</think>b</think>"
SEQUENCES = [
    [("<user>x<a>", False), (BAD_CALL, True), ("<user>y<a>", False), ("four", True)],
    [("<user>x<a>", False), (BAD_THOUGHT, True), ("<user>y<a>", False), ("<think>a</think>b</think><tool_call>", True)],
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("grpo", "first", "second", "rates"),
    [
        (
            {"invalid_tool_call_advantage": -5.0, "malformed_thinking_advantage": -7.0},
            [-5.0, 0.5],
            [-7.0, -5.0],
            (2.0, 1.0),
        ),
        ({"invalid_tool_call_advantage": -5.0}, [-5.0, 0.5], [10.0, -5.0], (2.0, 0.0)),
        ({"malformed_thinking_advantage": 0.0}, [0.5, 0.5], [0.0, 0.0], (0.0, 2.0)),
    ],
)
def test_a_turn_with_a_flaw_has_the_advantage_that_is_set(
    grpo: dict[str, float], first: list[float], second: list[float], rates: tuple[float, float]
) -> None:
    """The numbers of a message replace those of its tokens, a call's before thinking's, as in
    ``_apply_message_level_advantage_penalties`` of NeMo-RL."""
    config = config_of(grpo)
    assert config.advantage_estimator.endswith("turn_penalties.penalise")
    batch = batch_of(config, SEQUENCES)
    columns, metrics = penalise(config, ScoredShard(batch=batch, scores={}, sum_over_ranks=lambda tensor: tensor * 2))
    (advantages_T,) = columns.values()
    turns = [(start, end) for _, start, end in turns_in(batch)]
    for (start, end), expected in zip(turns, first + second, strict=True):
        assert (advantages_T[start:end] == np.float32(expected)).all()
    outside_T = ~batch.loss_mask_T
    assert (advantages_T[outside_T] == batch.of_tokens("advantages")[outside_T]).all()
    assert metrics["num_assistant_messages"] == 8.0, "of both ranks"
    assert (metrics["num_invalid_tool_calls"] / 2, metrics["num_malformed_thinking"] / 2) == rates
    assert metrics["invalid_tool_call_rate"] == rates[0] / 4


@pytest.mark.usefixtures("here")
def test_the_estimator_of_the_run_comes_first() -> None:
    config = config_of(
        {"adv_estimator": {"name": "reinforce_plus_plus"}, "invalid_tool_call_advantage": -5.0},
    )
    batch = batch_of(config, SEQUENCES)
    shard = ScoredShard(batch=batch, scores={}, sum_over_ranks=lambda tensor: tensor.to(torch.float64))
    advantages_T = next(iter(penalise(config, shard).columns.values()))
    (_, start, end), (_, after, last), *_ = turns_in(batch)
    assert (advantages_T[start:end] == -5.0).all()
    assert (advantages_T[after:last] < 0).all(), "whitened: below the mean"
    assert (advantages_T[after:last] != 0.5).all()


def test_a_run_without_penalties_has_none_of_it() -> None:
    assert config_of({}).advantage_estimator == ""


def test_only_turns_of_agents_are_penalised() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of({"malformed_thinking_advantage": -5.0}, {"exact_match": {}})
    assert caught.value.problems == (
        "configuration: grpo.malformed_thinking_advantage: -5, but env.exact_match is no agent, whose turns alone are "
        "penalised",
    )
