"""Samples that go on while others run, commands beside each other, and weights that change meanwhile: for any engine.

Tests that `test_async_rollouts.py` runs with the embedded engine and `tests/vllm` with the real vLLM, each with its own
fixture `start`.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import reference_logprobs
from numpy.typing import NDArray
from own_environments import WAIT_S, Dawdles, Holds, ScoresAtOnce
from rollout_harness import Rollout, tokens_of

from tandem.common.errors import RefitError
from tandem.common.messages import Generated, SamplesFinished
from tandem.refit.weights import Weights

MODEL = {"hidden_size": 64, "head_dim": 32}
"""What vLLM's kernels take, too."""
Start = Callable[..., Rollout]


def finished(rollout: Rollout) -> list[tuple[int, int]]:
    """Return the groups of the samples sent so far, with the commands that they answer."""
    sent = [message for message, _ in rollout.context.sent if isinstance(message, SamplesFinished)]
    return [(message.command_id, sample.group) for message in sent for sample in message.samples]


def generated(rollout: Rollout) -> list[int]:
    """Return the commands that were answered."""
    return [message.command_id for message, _ in rollout.context.sent if isinstance(message, Generated)]


def work_until(rollout: Rollout, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert rollout.service.work()
        assert time.monotonic() < deadline


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [True, False])
def test_others_go_on_while_an_answer_is_awaited(start: Start, is_async: bool) -> None:
    Holds.release.clear()
    rollout = start(Holds, generation={"async_engine": is_async}, num_workers=2)
    command = rollout.start(rollout.group(0, [1]), *(rollout.group(number, [1, 2]) for number in range(1, 4)))
    if is_async:
        work_until(rollout, lambda: len(finished(rollout)) == 6)
        assert {group for _, group in finished(rollout)} == {1, 2, 3}
        assert rollout.service.parts.engine.num_unfinished == 0
    else:
        for _ in range(300):
            assert rollout.service.work()
        assert finished(rollout) == []  # the engine waits before anybody's second response
    Holds.release.set()
    assert len(rollout.finish()) == 7
    assert generated(rollout) == [command]


def test_samples_are_those_of_the_engine_that_waits(start: Start) -> None:
    at_once = start(Dawdles, generation={"vllm_cfg": {"async_engine": True}}, num_workers=3)
    waiting = start(Dawdles, generation={}, num_workers=3)
    groups = [at_once.group(number, range(5)) for number in range(3)]
    one, two = at_once.run(*groups), waiting.run(*groups)
    assert tokens_of(one) == tokens_of(two)
    for key, (sample, arrays) in one.items():
        assert sample == two[key][0]
        # Not to the bit: what runs together is not the same.
        np.testing.assert_allclose(arrays.generation_logprobs_T, two[key][1].generation_logprobs_T, atol=2e-5)


# --- commands --------------------------------------------------------------------------------------------------------


def test_commands_run_beside_each_other_until_one_says_otherwise(start: Start) -> None:
    rollout = start(Dawdles, generation={"async_engine": True}, num_workers=2)
    groups = [rollout.group(number, range(3)) for number in range(4)]
    expected = tokens_of(rollout.run(*groups))
    first = rollout.start(groups[0], groups[1])
    for _ in range(3):
        assert rollout.service.work()
    second = rollout.start(groups[2], groups[3], cancel_before=first)
    samples = rollout.finish()
    assert tokens_of(samples) == expected
    assert sorted(generated(rollout)) == [first, second]
    assert {command: {g for c, g in finished(rollout) if c == command} for command in (first, second)} == {
        first: {0, 1},
        second: {2, 3},
    }
    rollout.context.sent.clear()
    given_up = [rollout.start(groups[0]), rollout.start(groups[1], cancel_before=0)]
    for _ in range(8):
        assert rollout.service.work()
    rollout.context.sent.clear()
    third = rollout.start(groups[1], groups[2])
    assert tokens_of(rollout.finish()) == {key: tokens for key, tokens in expected.items() if key[0] in (1, 2)}
    assert generated(rollout) == [third]
    assert not given_up.count(third)
    assert rollout.service.parts.engine.num_unfinished == 0


# --- weights ---------------------------------------------------------------------------------------------------------

IN_FLIGHT = {"in_flight_weight_updates": True}


def change(rollout: Rollout) -> Any:
    """Move every weight a little, as an optimizer step would, where refits read; return a copy of before."""
    before = copy.deepcopy(rollout.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in rollout.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return before


def continued_logprobs(old: Any, new: Any, prompt: list[int], made: list[int], num_old: int) -> NDArray[np.float32]:
    """Return log-probabilities of what `new` makes on top of the keys and values that `old` has left."""
    prefix = [*prompt, *made[: num_old - 1]]  # the newest token's come with the next one
    keys = "cache" if "cache" in inspect.signature(new.forward).parameters else "past_key_values"  # before 5.24
    with torch.no_grad():
        cache = old(input_ids=torch.tensor([prefix]), use_cache=True).past_key_values
        logits_TV = new(input_ids=torch.tensor([made[num_old - 1 : -1]]), **{keys: cache}).logits[0]
    wanted_T = torch.tensor(made[num_old:])
    result: NDArray[np.float32] = logits_TV.log_softmax(dim=-1).gather(1, wanted_T[:, None]).squeeze(1).numpy()
    return result


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_version_is_taken_between_two_tokens(start: Start, recomputes: bool) -> None:
    async_grpo = {**IN_FLIGHT, "recompute_kv_cache_after_weight_updates": recomputes}
    rollout = start(ScoresAtOnce, generation={}, async_grpo=async_grpo)
    groups = [rollout.group(number, range(2)) for number in range(3)]  # one more than there are slots
    command = rollout.start(*groups, max_new_tokens=30, ends=False)
    for _ in range(12):
        assert rollout.service.work()
    old = change(rollout)
    rollout.refit(7)
    samples = rollout.finish()
    assert generated(rollout) == [command]
    assert len(samples) == 6
    differences = []
    for (number, _), (sample, arrays) in samples.items():
        prompt = groups[number].prompt_ids
        made_T, logprobs_T = arrays.token_ids_T[len(prompt) :], arrays.generation_logprobs_T[len(prompt) :]
        versions = arrays.versions_T[len(prompt) :].tolist()
        num_old = versions.count(0)
        assert sample.response_length == 30
        assert versions == [0] * num_old + [7] * (30 - num_old)
        if num_old == 0:
            continue  # it waited for a slot
        assert num_old >= 8
        by_old = reference_logprobs(old, prompt, made_T)
        by_new = reference_logprobs(rollout.model, prompt, made_T)
        by_both = continued_logprobs(old, rollout.model, [*prompt], made_T.tolist(), num_old)
        np.testing.assert_allclose(logprobs_T[:num_old], by_old[:num_old], atol=1e-4)
        np.testing.assert_allclose(logprobs_T[num_old:], by_new[num_old:] if recomputes else by_both, atol=1e-4)
        differences.append(np.abs(by_new[num_old:] - by_both).max())
    assert len(differences) >= 5
    assert min(differences) > 1e-3  # old keys and values can be told from new ones


def test_requests_added_later_use_nothing_of_the_weights_before(start: Start) -> None:
    rollout = start(ScoresAtOnce, generation={"async_engine": True}, async_grpo=IN_FLIGHT)
    group = rollout.group(12345678901234567, range(2))  # a prompt of more than a block of vLLM's cache
    command = rollout.start(group, max_new_tokens=16, ends=False)
    for _ in range(6):
        assert rollout.service.work()
    change(rollout)
    rollout.refit(1)
    again = rollout.start(group, max_new_tokens=16, ends=False, cancel_before=command)
    deadline = time.monotonic() + WAIT_S
    while rollout.service.work():
        assert time.monotonic() < deadline
    for message, _ in rollout.context.sent:
        if isinstance(message, SamplesFinished) and message.command_id == again:
            arrays = rollout.fetch(message)
            for row in range(len(message.samples)):
                sample, length = arrays.take([row]), len(group.prompt_ids)
                expected_T = reference_logprobs(rollout.model, group.prompt_ids, sample.token_ids_T[length:])
                np.testing.assert_allclose(sample.generation_logprobs_T[length:], expected_T, atol=1e-4)
    assert sorted(generated(rollout)) == [command, again]


@pytest.mark.parametrize(("in_flight", "version"), [(False, 1), (True, 0)], ids=["not in flight", "mended"])
def test_otherwise_what_was_begun_is_given_up(start: Start, in_flight: bool, version: int) -> None:
    rollout = start(ScoresAtOnce, generation={}, async_grpo={"in_flight_weight_updates": in_flight})
    group = rollout.group(0, range(3))
    expected = tokens_of(rollout.run(group))
    rollout.start(group, max_new_tokens=30, ends=False)
    for _ in range(3):
        assert rollout.service.work()
    rollout.refit(version)  # of the same weights
    assert not rollout.service.work()
    assert generated(rollout) == []
    assert tokens_of(rollout.run(group)) == expected


def test_nothing_goes_on_with_partial_weights(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = start(ScoresAtOnce, generation={}, async_grpo=IN_FLIGHT)
    group = rollout.group(0, range(3))
    expected = tokens_of(rollout.run(group))
    rollout.start(group, max_new_tokens=30, ends=False)
    assert rollout.service.work()

    def break_off(*args: Any) -> dict[str, int]:
        raise RefitError("the cable was bitten through")

    with monkeypatch.context() as patched:
        patched.setattr(Weights, "apply", break_off)
        with pytest.raises(RefitError, match="bitten through"):
            rollout.refit(1)
    assert not rollout.service.work()
    assert (rollout.context.errors, generated(rollout)) == ([], [])
    rollout.refit(1)
    assert tokens_of(rollout.run(group)) == expected
