"""Guests of a rollout with the embedded engine; `tests/vllm` runs the same tests with the real vLLM."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from guests_cases import (
    DISJOINT,
    WAIT_S,
    Guest,
    Start,
    test_guests_are_told_what_is_wrong_and_whom_they_talk_to,
    test_guests_run_beside_samples_where_these_join_and_leave_at_any_time,
    test_samples_are_the_same_to_the_bit_whoever_asks_meanwhile,
    test_weights_change_in_the_middle_of_an_answer,
    until,
)
from own_environments import Length
from rollout_harness import Rollout
from serving_harness import client

from tandem.rollout.external_requests import ExternalRequests

__all__ = [
    "test_guests_are_told_what_is_wrong_and_whom_they_talk_to",
    "test_guests_run_beside_samples_where_these_join_and_leave_at_any_time",
    "test_samples_are_the_same_to_the_bit_whoever_asks_meanwhile",
    "test_weights_change_in_the_middle_of_an_answer",
]
MODEL = {"max_position_embeddings": 256}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Rollout] = []

    def make(*, external_requests: bool = True, **generation: Any) -> Rollout:
        environment = f"{Length.__module__}.{Length.__qualname__}"
        settings = {"expose_http_server": external_requests, **generation}
        folder = tmp_path / str(len(started))
        started.append(Rollout(folder, environment, total=200, model=MODEL, generation=settings))
        return started[-1]

    yield make
    for rollout in started:
        rollout.service.close()


def test_beyond_loopback_a_token_is_asked_for(start: Start) -> None:
    rollout = start(external_requests=False, **DISJOINT)
    engine = rollout.service.parts.engine
    assert engine is not None
    external_requests = ExternalRequests(rollout.config, engine, rollout.tokenizer, "0.0.0.0", lambda: None)
    with contextlib.closing(external_requests):
        assert len(external_requests.address.token) > 20
        for token, may_ask in ((external_requests.address.token, True), ("another", False)):
            refusal = contextlib.nullcontext() if may_ask else pytest.raises(openai.AuthenticationError)
            with client(external_requests.address.url, token) as asking, refusal:
                assert "policy" in [model.id for model in asking.models.list()]


def test_a_guest_who_leaves_makes_room(start: Start) -> None:
    rollout = start(**DISJOINT)
    external_requests = rollout.service.parts.external_requests
    assert external_requests is not None
    assert rollout.external_requests is not None
    left = threading.Event()

    def leave() -> None:
        with (
            client(rollout.external_requests.url) as asking,
            asking.completions.create(
                model="policy", prompt="1", max_tokens=190, stream=True, extra_body={"ignore_eos": True}
            ) as stream,
        ):
            next(iter(stream))
        left.set()

    leaving = threading.Thread(target=leave)
    leaving.start()

    def has_left() -> bool:
        external_requests.work()
        return left.is_set()

    until(has_left)
    until(lambda: not external_requests.num_running or not external_requests.work())
    leaving.join(WAIT_S)
    assert not rollout.service.work()


def test_an_answer_that_is_interrupted_is_the_one_that_is_not(start: Start) -> None:
    rollout = start(**DISJOINT)
    service, external_requests = rollout.service, rollout.service.parts.external_requests
    assert external_requests is not None
    with Guest(rollout) as guest:
        alone = guest.answer(guest.ask())
        text = alone.choices[0].text
        assert alone.weight_versions == [0]
        stop = text[20:23]
        stopped = guest.answer(guest.ask(stop=stop))
        for stops in (None, stop):
            asked = guest.ask(stop=stops)
            number = 0
            while not asked.done():
                service.work()
                if number % 3 == 0:
                    external_requests.pause()
                number += 1
            interrupted, wanted = asked.result(), stopped if stops else alone
            assert interrupted.choices[0].token_ids == wanted.choices[0].token_ids
            assert interrupted.choices[0].text == wanted.choices[0].text
            assert interrupted.choices[0].finish_reason == wanted.choices[0].finish_reason
            near = pytest.approx(wanted.choices[0].logprobs.token_logprobs, abs=1e-5)
            assert interrupted.choices[0].logprobs.token_logprobs == near
