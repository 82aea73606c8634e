"""Samples of several turns, made by the rollout service with a real engine: tokens, masks, limits, seeds, failures."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import reference_logprobs
from own_environments import WAIT_S, HoldsOne
from rollout_harness import Rollout, tokens_of

from tandem.common.messages import PromptGroup, SamplesFinished
from tandem.rollout.conversation import turn_seed
from tandem.samples.batch import SampleBatch


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rollout]]:
    started: list[Rollout] = []

    def make(environment: str, **settings: Any) -> Rollout:
        started.append(Rollout(tmp_path / str(len(started)), f"own_environments.{environment}", **settings))
        return started[-1]

    yield make
    for rollout in started:
        rollout.service.close()


# --- tokens ----------------------------------------------------------------------------------------------------------


def segments(rollout: Rollout, group: PromptGroup, arrays: SampleBatch) -> list[tuple[int, int, bool]]:
    """Return the stretches after the prompt that the policy made, and those that it was told."""
    mask_T = arrays.loss_mask_T
    edges = [0, *(np.flatnonzero(np.diff(mask_T)) + 1).tolist(), len(mask_T)]
    found = [(first, end, bool(mask_T[first])) for first, end in itertools.pairwise(edges)]
    assert found[0] == (0, len(group.prompt_ids), False)
    return found[1:]


def test_a_sample_goes_on_from_exactly_its_own_tokens(start: Callable[..., Rollout]) -> None:
    rollout = start("Talks", kwargs={"turns": 3})
    groups = [rollout.group(number, [10 * number + i for i in range(4)]) for number in range(3)]
    samples = rollout.run(*groups)
    texts = rollout.texts(*groups)
    would_differ = []
    for (number, place), (sample, arrays) in samples.items():
        tokens = arrays.token_ids_T.tolist()
        assert tokens[: sample.prompt_length] == list(groups[number].prompt_ids)
        parts = segments(rollout, groups[number], arrays)
        assert [made for *_, made in parts] == [True, False, True, False, True]
        for turn, (first, end, made) in enumerate(parts):
            if made:
                # Everything before it is what the engine saw: Hugging Face gives the same probabilities.
                expected = reference_logprobs(rollout.model, tuple(tokens[:first]), arrays.token_ids_T[first:end])
                np.testing.assert_allclose(arrays.generation_logprobs_T[first:end], expected, atol=2e-5)
                assert set(arrays.versions_T[first:end].tolist()) == {0}
                text = rollout.tokenizer.decode(tokens[first:end])
                would_differ.append(rollout.tokenizer.encode(text) != tokens[first:end])
            else:
                ended = tokens[first - 1] == rollout.tokenizer.eos_id
                said = f"\nu: {number}{(turn + 1) // 2}\na: "
                assert rollout.tokenizer.decode(tokens[first:end], skip_special_tokens=False) == (
                    said if ended else "<eos>" + said
                )
                assert not arrays.generation_logprobs_T[first:end].any()
                assert set(arrays.versions_T[first:end].tolist()) == {-1}
        assert sample.response_length == int(arrays.loss_mask_T.sum())
        assert (sample.num_turns, sample.reward, sample.correct) == (3, 1.5, True)
        assert sample.response == "", "text is for validation"
        assert {f"{number}1", f"{number}2"} < set(texts[number, place].split("\n"))
    assert any(would_differ), "no response tells exact tokens from tokens made again of their text"


def test_an_environment_that_only_scores_has_one_turn(start: Callable[..., Rollout]) -> None:
    rollout = start("Scores")
    group = rollout.group(0, [1, 2])
    (sample, arrays), *_ = rollout.run(group).values()
    assert (sample.num_turns, sample.reward) == (1, float(len(rollout.texts(group)[0, sample.sample])))
    assert arrays.loss_mask_T.tolist() == [False] * sample.prompt_length + [True] * sample.response_length


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_turns_are_limited(start: Callable[..., Rollout], turns: int) -> None:
    rollout = start("Talks", turns=turns, kwargs={"turns": 9})
    group = rollout.group(0, range(4))
    for sample, arrays in rollout.run(group).values():
        assert (sample.num_turns, sample.finish_reason) == (turns, "turns")
        assert (sample.reward, sample.correct) == (0.25 * turns, False)
        assert arrays.loss_mask_T[-1], "nothing comes after the last response"
        assert len(segments(rollout, group, arrays)) == 2 * turns - 1


def test_the_environment_may_end_a_sample_in_its_last_turn(start: Callable[..., Rollout]) -> None:
    rollout = start("Talks", turns=2, kwargs={"turns": 2})
    for sample, _ in rollout.run(rollout.group(0, range(4))).values():
        assert (sample.num_turns, sample.reward, sample.correct) == (2, 1.25, True)
        assert sample.finish_reason in ("stop", "length")


def test_a_sample_ends_where_no_other_response_fits(start: Callable[..., Rollout]) -> None:
    total = 40
    rollout = start("Talks", turns=99, total=total, kwargs={"turns": 99})
    group = rollout.group(0, range(12))
    lengths = set()
    for sample, arrays in rollout.run(group).values():
        assert sample.finish_reason == "length"
        assert sample.reward == 0.25 * sample.num_turns
        assert arrays.loss_mask_T[-1]
        (length,) = arrays.lengths_S.tolist()
        answer = len("\nu: 01\na: ") + (arrays.token_ids_T[-1] != rollout.tokenizer.eos_id)
        assert length <= total <= length + answer + (sample.num_turns > 9)
        lengths.add(length)
    assert len(lengths) > 1


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_a_sample_depends_on_nothing_that_runs_beside_it(start: Callable[..., Rollout]) -> None:
    rollout = start("Talks", kwargs={"turns": 3})
    groups = [rollout.group(number, [number, 7, 7]) for number in range(4)]
    together = tokens_of(rollout.run(*groups))
    alone = {}
    for group in reversed(groups):
        alone |= tokens_of(rollout.run(group))
    assert alone == together
    assert all(together[number, 1] == together[number, 2] for number in range(4))
    assert together[0, 0] != together[0, 1]


def test_how_long_an_environment_takes_changes_no_bit(start: Callable[..., Rollout]) -> None:
    quick = start("Talks", kwargs={"turns": 3})
    slow = start("Talks", kwargs={"turns": 3, "delay_s": 0.003}, num_workers=3)
    groups = [quick.group(number, range(5)) for number in range(3)]
    one, two = quick.run(*groups), slow.run(*groups)
    assert one.keys() == two.keys()
    for key, (sample, arrays) in one.items():
        assert two[key][0] == sample
        for name, values in arrays.columns.items():
            np.testing.assert_array_equal(two[key][1].columns[name], values)


def test_each_turn_draws_anew() -> None:
    assert turn_seed(7, 0) == 7
    # Written down, so that a change of the hash, which would break resuming, does not go unnoticed.
    assert turn_seed(7, 1) == 2174948161648732372
    assert len({turn_seed(seed, turn) for seed in range(20) for turn in range(20)}) == 400


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "environment 'mine', problem 'p0': LookupError: no such room"),
        ("reward", "environment 'mine', problem 'p0': the reward is nan, not a finite number"),
        ("nothing", "environment 'mine', problem 'p0': the messages of a Turn are [], not a list of {role, content}"),
        ("text", "environment 'mine', problem 'p0': the messages of a Turn are '1', not a list of {role, content}"),
        (
            "assistant",
            "environment 'mine', problem 'p0': a Turn holds an assistant message, which only the policy can give",
        ),
        ("none", "environment 'mine', problem 'p0': step() returned NoneType, not a Score or a Turn"),
    ],
)
def test_an_environment_that_fails_in_a_later_turn_is_named(
    start: Callable[..., Rollout], how: str, message: str
) -> None:
    rollout = start("Fails", kwargs={"how": how})
    where = r" \(.*/own_environments\.py:\d+, in step\)" if how == "raises" else ""
    assert re.fullmatch(re.escape(message) + where, rollout.error(rollout.group(0, [1])))


def test_an_answer_that_the_tokenizer_cannot_take_is_named(start: Callable[..., Rollout]) -> None:
    rollout = start("Fails", kwargs={"how": "unknown"})
    message = rollout.error(rollout.group(0, [1]))
    assert message.startswith("environment 'mine', problem 'p0': the tokenizer in ")
    assert message.endswith("does not know the character 'é'")


def test_an_answer_that_takes_too_long_is_named(start: Callable[..., Rollout]) -> None:
    rollout = start("Fails", kwargs={"how": "hangs"}, timeout_s=0.2)
    message = rollout.error(rollout.group(0, [1]))
    assert message.startswith("environment 'mine' took longer than 0.2 s")
    assert "'p0'" in message


def test_a_generation_that_is_abandoned_between_turns_leaves_nothing(start: Callable[..., Rollout]) -> None:
    rollout = start("Talks", kwargs={"turns": 3, "delay_s": 0.003})
    groups = [rollout.group(number, range(3)) for number in range(3)]
    expected = tokens_of(rollout.run(*groups))
    for num_steps in (1, 6, 12):
        rollout.start(*groups)
        for _ in range(num_steps):
            assert rollout.service.work()
        rollout.context.sent.clear()
        assert tokens_of(rollout.run(*groups)) == expected


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_samples_are_kept_until_they_are_released(start: Callable[..., Rollout]) -> None:
    rollout = start("Scores")
    samples = rollout.run(rollout.group(0, [1, 2]))
    for sample, arrays in samples.values():
        assert sample.num_tokens == len(arrays.token_ids_T) == sample.prompt_length + sample.response_length
        assert (sample.oldest_version, sample.newest_version) == (0, 0)
    assert rollout.store.num_tokens == sum(sample.num_tokens for sample, _ in samples.values())
    rollout.refit(1)
    more = rollout.run(rollout.group(1, [1]))
    assert {(sample.oldest_version, sample.newest_version) for sample, _ in more.values()} == {(1, 1)}
    rollout.release(0)
    assert rollout.store.num_tokens == sum(sample.num_tokens for sample, _ in more.values())
    rollout.release(1)
    assert rollout.store.num_tokens == 0
    assert not rollout.context.sent, "nobody waits for an answer"


def test_what_is_given_up_is_released_but_for_groups_that_were_finished(start: Callable[..., Rollout]) -> None:
    rollout = start("HoldsOne", generation={"async_engine": True}, num_workers=2)
    held, done = rollout.group(0, [1, 2]), rollout.group(1, [1, 2])
    HoldsOne.release.clear()
    rollout.start(held, done)
    deadline = time.monotonic() + WAIT_S
    while sum(len(message.samples) for message in finished(rollout)) < 3:
        assert rollout.service.work()
        assert time.monotonic() < deadline
    samples = [sample for message in finished(rollout) for sample in message.samples]
    assert rollout.store.num_tokens == sum(sample.num_tokens for sample in samples)
    rollout.start()  # nothing more, and what came before is given up
    HoldsOne.release.set()
    kept = [sample.num_tokens for sample in samples if sample.group == 1]
    assert (len(kept), sum(kept)) == (2, rollout.store.num_tokens), "of the group that was finished"
    for message in finished(rollout):
        if {sample.group for sample in message.samples} == {1}:
            assert rollout.fetch(message)


def finished(rollout: Rollout) -> list[SamplesFinished]:
    return [message for message, _ in rollout.context.sent if isinstance(message, SamplesFinished)]


def test_samples_for_which_there_is_no_room_are_an_error(start: Callable[..., Rollout]) -> None:
    rollout = start("Scores", generation={"max_stored_tokens": 1024})
    rollout.start(rollout.group(0, range(150)))
    while rollout.service.work():
        assert not rollout.context.errors
    (error,) = rollout.context.errors
    assert re.match(r"no room for a sample of \d+ tokens: .*policy.generation.max_stored_tokens is 1024$", str(error))
    assert rollout.store.num_tokens == 0, "what was made of a group that is given up is released"
