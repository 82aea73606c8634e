"""The tree of an episode: what a request continues, and how branches are cut from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_harness import CHARACTERS, TEMPLATE

from tandem.common.errors import ConfigError, WireError
from tandem.common.messages import Problem, PromptGroup
from tandem.config import build_config
from tandem.config.schema import NewModel
from tandem.rollout.agents.session import EpisodeSession
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.environments import Score
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import BatchSharding, batches_of_samples
from tandem.samples.model_files import load_tokenizer, write_new_model
from tandem.samples.tokenizer import Tokenizer

SETTINGS: dict[str, Any] = {
    "algorithm": "grpo",
    "grpo": {},
    "data": {"dataset_name": "jsonl", "train_data_path": "train.jsonl"},
    "policy": {"model_name": "model"},
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_new_model(tmp_path / "model", NewModel(config={"model_type": "qwen3"}, characters=CHARACTERS))
    policy = {"model_name": str(tmp_path / "model"), "tokenizer": {"chat_template": TEMPLATE}}
    return load_tokenizer(build_config({**SETTINGS, "policy": policy, "env": {"math": {}}}))


class Play:
    """A session, and a policy that says what it is told to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        problem = Problem(problem_id="p", question="", answer="", metadata={})
        self.session = EpisodeSession(
            PromptGroup(group=0, problem=problem, prompt_ids=(5, 6), seeds=(1,)), 0, tokenizer
        )

    def ask(self, *said: str, answer: str, version: int = 0, **variables: Any) -> list[int]:
        """Ask with what users and the policy said by turns; return the tokens of the prompt."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(said)]
        prompt_ids = self.session.prompt_of(messages, variables)
        token_ids = np.array([*self.tokenizer.encode(answer), self.tokenizer.eos_id], dtype=np.int32)
        completion = EngineCompletion(
            request_id=0,
            token_ids_T=token_ids,
            logprobs_T=np.full(len(token_ids), -0.5, dtype=np.float32),
            versions_T=np.full(len(token_ids), version, dtype=np.int32),
            finish_reason="stop",
        )
        self.session.add(prompt_ids, completion, [*messages, {"role": "assistant", "content": answer}], variables)
        return prompt_ids

    def branches(self) -> list[tuple[str, str]]:
        """Return the text of each branch, and of what counts in it."""
        _, arrays = self.session.finish(Score(0.0, correct=False), version=0)
        rows = [arrays.take([row]) for row in range(len(arrays.lengths_S))]
        texts = [(row.token_ids_T.tolist(), row.token_ids_T[row.loss_mask_T].tolist()) for row in rows]
        return [tuple(self.tokenizer.decode(ids, skip_special_tokens=False) for ids in both) for both in texts]  # type: ignore[misc]


def test_a_conversation_that_goes_on_is_one_branch(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    play.ask("1", answer="2")
    play.ask("1", "2", "3", answer="4")
    assert play.branches() == [("<bos>u: 1\na: 2<eos>\nu: 3\na: 4<eos>", "2<eos>4<eos>")]


def test_the_tokens_are_those_that_were_sampled_however_the_text_would_be_tokenised(tokenizer: Tokenizer) -> None:
    """The policy may say a text in tokens that no tokeniser makes of it; here its text even lacks a token."""
    play = Play(tokenizer)
    play.ask("1", answer="2<bos>")  # decoded without special tokens: what the agent is told, and says again
    exchange = play.session.exchanges[0]
    said = [{"role": "assistant", "content": "2"}]
    play.session.exchanges[0] = type(exchange)(
        **{name: getattr(exchange, name) for name in exchange.__struct_fields__ if name != "messages"},
        messages=[*exchange.messages[:1], *said],
    )
    prompt_ids = play.ask("1", "2", "3", answer="4")
    assert tuple(prompt_ids[: len(exchange.token_ids)]) == exchange.token_ids
    assert len(play.branches()) == 1


def test_retries_and_ways_that_part_are_branches_and_nothing_counts_twice(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    play.ask("1", answer="2")
    play.ask("1", answer="22")
    play.ask("1", "2", "3", answer="4")
    play.ask("1", "2", "3", answer="44")
    play.ask("1", "22", "5", answer="6")
    assert play.branches() == [
        ("<bos>u: 1\na: 2<eos>\nu: 3\na: 4<eos>", "2<eos>4<eos>"),
        ("<bos>u: 1\na: 2<eos>\nu: 3\na: 44<eos>", "44<eos>"),
        ("<bos>u: 1\na: 22<eos>\nu: 5\na: 6<eos>", "22<eos>6<eos>"),
    ]
    scored, _ = play.session.finish(Score(1.0, correct=True), version=0)
    assert [branch.num_made for branch in scored.branches] == [4, 3, 5]
    assert scored.response_length == 12
    assert scored.tokens_by_version == (12,)


def test_what_was_changed_begins_anew_and_what_others_said_for_the_policy_does_not_count(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    play.ask("1", answer="2")
    play.ask("1", "20", "3", answer="4")
    play.ask("1", "2", "3", "7", "5", answer="6")
    assert play.branches() == [
        ("<bos>u: 1\na: 20<eos>\nu: 3\na: 4<eos>", "4<eos>"),
        ("<bos>u: 1\na: 2<eos>\nu: 3\na: 7<eos>\nu: 5\na: 6<eos>", "2<eos>6<eos>"),
    ]


def test_versions_are_counted_over_all_branches(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    play.ask("1", answer="2", version=4)
    play.ask("1", answer="22", version=6)
    scored, _ = play.session.finish(Score(1.0, correct=True), version=9)
    assert (scored.oldest_version, scored.newest_version, scored.tokens_by_version) == (4, 6, (2, 0, 3))


def test_who_asks_for_nothing_has_the_prompt_of_the_problem_and_nothing_counts(tokenizer: Tokenizer) -> None:
    scored, arrays = Play(tokenizer).session.finish(Score(0.0, correct=False), version=3)
    assert (scored.prompt_length, scored.response_length, scored.num_turns, scored.branches) == (2, 0, 0, ())
    assert (scored.oldest_version, scored.newest_version, scored.tokens_by_version) == (3, 3, (0,))
    assert arrays.token_ids_T.tolist() == [5, 6]
    assert not arrays.loss_mask_T.any()


def test_global_batches_are_so_many_samples_whatever_branches_they_have() -> None:
    branch_S = np.array([0, 1, 0, 0, 1, 2, 0], dtype=np.int32)
    assert batches_of_samples(branch_S, 2) == [range(0, 3), range(3, 7)]
    assert batches_of_samples(branch_S, 3) == [range(0, 6), range(6, 7)]
    sharding = BatchSharding(num_ranks=2, batch_size=2, unit=1, by_tokens=False, by_prompts=False)
    lengths_S = np.array([9, 5, 7, 8, 8, 2, 3], dtype=np.int32)
    rank_S = sharding.ranks(lengths_S, np.full(7, -1, dtype=np.int32), branch_S)
    assert sorted(np.bincount(rank_S[:3]).tolist()) == [1, 2]
    assert np.bincount(rank_S[3:]).tolist() == [2, 2]


def test_branches_in_a_table_follow_one_another() -> None:
    column = np.zeros(2, dtype=np.int32)
    table = SampleBatch(
        lengths_S=column + 3,
        num_valid_S=column + 1,
        prompt_S=column - 1,
        prompt_lengths_S=column + 1,
        rank_S=column,
        advantages_S=column.astype(np.float32),
        rewards_S=column.astype(np.float32),
        source_S=column,
        command_S=column.astype(np.int64),
        group_S=column,
        sample_S=column,
        branch_S=np.array([0, 2], dtype=np.int32),
    )
    with pytest.raises(WireError, match="branch_S: 2 for sequence 1, must be 0, or follow the one before it"):
        table.attach_sources(["rollout-0"]).check_table(num_ranks=1)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"command": ["a"], "url": "http://b/"}, r"env\.mine\.url: env\.mine\.command is given too"),
    "with a class": ({"command": ["a"], "class": "b.C"}, r"env\.mine\.command: env\.mine\.class is given too"),
    "nothing to run": ({"command": []}, r"env\.mine\.command: is empty"),
    "no address": ({"url": "localhost:8000"}, r"env\.mine\.url: 'localhost:8000', must be http://HOST:PORT/PATH"),
    "a server that stays": (
        {"url": "http://b/", "persistent": True},
        r"env\.mine\.persistent: only agents' programs persist",
    ),
    "failures": ({"command": ["a"], "max_failures": 3}, r"env\.mine\.max_failures: the first failure ends the run"),
    "neither": ({}, r"env\.mine: not built in .* and without a class, a command, a judge or a model_name"),
}


@pytest.mark.parametrize(("agent", "why"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_an_agent_is_said_before_anything_starts(agent: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build_config({**SETTINGS, "env": {"mine": agent}})
