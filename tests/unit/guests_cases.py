"""Guests of a rollout: requests from outside the run, which get what training leaves of its engine.

The embedded engine and the real vLLM (`tests/vllm`) are both tested so.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import torch
from rollout_harness import CHARACTERS, Rollout, tokens_of

from tandem.common.messages import SampleScored
from tandem.samples.batch import SampleBatch

Samples = dict[tuple[int, int], tuple[SampleScored, SampleBatch]]
Start = Callable[..., Rollout]
WAIT_S = 120.0
DISJOINT = {"colocated": {"enabled": False}}
"""The engine has a device of its own: it is free while nothing is generated."""


class Guest:
    """A client in a thread of its own, while this one drives the service."""

    def __init__(self, rollout: Rollout) -> None:
        assert rollout.external_requests is not None
        self._rollout = rollout
        self._pool = ThreadPoolExecutor(8)
        self._client = openai.OpenAI(
            base_url=f"{rollout.external_requests.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        )

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        external_requests = self._rollout.service.parts.external_requests
        assert external_requests is not None
        external_requests._driver.drop("the test is over")  # where it has failed, somebody may wait
        self._client.close()
        self._pool.shutdown()

    def ask(self, **how: Any) -> Future[Any]:
        """Ask for a completion, token ids and log-probabilities included."""
        settings = {"max_tokens": 40, "seed": 5, "logprobs": 0, "prompt": "1u2", **how}
        extra = {"return_token_ids": True, "ignore_eos": True}
        return self._pool.submit(lambda: self._client.completions.create(model="policy", extra_body=extra, **settings))

    def answer(self, asked: Future[Any]) -> Any:
        """Drive the service until there is the answer."""
        while not asked.done():
            self._rollout.service.work()
        return asked.result()


def the_same(left: Samples, right: Samples) -> bool:
    """Tell whether samples are the same to the bit."""
    return left.keys() == right.keys() and all(
        np.array_equal(frame, other, equal_nan=True)
        for key, (_, arrays) in left.items()
        for frame, other in zip(arrays.columns.values(), right[key][1].columns.values(), strict=True)
    )


@pytest.mark.parametrize("placement", [{}, DISJOINT], ids=["colocated", "disjoint"])
def test_samples_are_the_same_to_the_bit_whoever_asks_meanwhile(start: Start, placement: dict[str, Any]) -> None:
    def step(rollout: Rollout, number: int) -> Samples:
        groups = [rollout.group(number * 3 + each, range(3)) for each in range(3)]
        made = rollout.run(*groups, max_new_tokens=30)
        for _ in range(3):  # guests have the engine for a moment, if it is theirs
            rollout.service.work()
        rollout.refit(number + 1)
        return made

    def steps(rollout: Rollout) -> list[Samples]:
        return [step(rollout, number) for number in range(6)]

    alone = steps(start(external_requests=False, **placement))
    rollout = start(**placement)
    num_tokens = 40 if placement else 190  # more than are made in the moment of one step
    assert rollout.service.parts.external_requests is not None
    driver = rollout.service.parts.external_requests._driver
    with Guest(rollout) as guest:
        answers: list[Any] = []

        def all_ask() -> bool:
            """Ask for those who have an answer, as a moment may be long on a busy machine; tell whether all wait."""
            for number, each in enumerate(asked):
                if each.done():
                    answers.append(each.result())
                    asked[number] = guest.ask(seed=number, max_tokens=num_tokens)
            return driver.num_unfinished == len(asked)

        def num_made() -> int:
            return sum(stream.request.num_made for stream in driver._arrived)

        asked = [guest.ask(seed=seed, max_tokens=num_tokens) for seed in range(4)]
        until(all_ask)
        together = steps(rollout)
        assert all(map(the_same, alone, together))
        later = itertools.count(6)  # the machine may have been elsewhere in all of their moments, which are short
        until(lambda: all_ask() and (num_made() > 0 or not step(rollout, next(later))))
        if placement:  # the engine is theirs now
            rollout.refit(next(later) + 1)
            answers += [guest.answer(each) for each in asked]
            assert max(len(answer.weight_versions) for answer in answers) > 1, "some of it was made between steps"
        else:
            had = num_made()
            for _ in range(3):
                rollout.service.work()
            assert num_made() == had, "the device is training's now"
            rollout.service.close()
            assert all(isinstance(each.exception(WAIT_S), openai.InternalServerError) for each in asked)
        assert all(answer.usage.completion_tokens == num_tokens for answer in answers)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.001)


def test_guests_run_beside_samples_where_these_join_and_leave_at_any_time(start: Start) -> None:
    rollout = start(async_engine=True, **DISJOINT)
    alone = tokens_of(rollout.run(rollout.group(0, range(12)), max_new_tokens=60, ends=False))
    with Guest(rollout) as guest:
        rollout.start(rollout.group(0, range(12)), max_new_tokens=60, ends=False)  # more than there are slots
        asked = guest.ask(max_tokens=20)
        answer = guest.answer(asked)
        assert rollout.service.generating.generations, "it did not wait for them"
        assert len(answer.choices[0].token_ids) == 20
        assert tokens_of(rollout.finish()) == alone


def test_weights_change_in_the_middle_of_an_answer(start: Start) -> None:
    rollout = start(**DISJOINT)
    with Guest(rollout) as guest:
        asked = guest.ask(max_tokens=100)
        until(lambda: rollout.service.work() and rollout.service.parts.external_requests is not None)
        with torch.no_grad():
            for parameter in rollout.model.parameters():
                parameter.mul_(1.5)
        rollout.refit(1)
        assert guest.answer(asked).weight_versions == [0, 1]
        assert guest.answer(guest.ask()).weight_versions == [1]


def test_guests_are_told_what_is_wrong_and_whom_they_talk_to(start: Start) -> None:
    rollout = start(**DISJOINT)
    assert rollout.external_requests is not None
    assert rollout.external_requests.url.startswith("http://127.0.0.1:")
    assert not rollout.external_requests.token, "on loopback nobody needs one"
    with Guest(rollout) as guest:
        (known,) = {model.root for model in guest._client.models.list()}
        assert known == "policy"
        with pytest.raises(openai.BadRequestError, match="the maximum context length is 200 tokens"):
            guest.answer(guest.ask(prompt=CHARACTERS[0] * 300))
        with pytest.raises(openai.NotFoundError, match="there is 'policy'"):
            guest._client.completions.create(model="nobody", prompt="1")
