"""Samples that go on while others run, commands beside each other, and weights that change meanwhile.

`tests/vllm` runs the same tests with the real vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from async_rollouts_cases import (
    MODEL,
    Start,
    generated,
    test_a_version_is_taken_between_two_tokens,
    test_commands_run_beside_each_other_until_one_says_otherwise,
    test_nothing_goes_on_with_partial_weights,
    test_others_go_on_while_an_answer_is_awaited,
    test_otherwise_what_was_begun_is_given_up,
    test_requests_added_later_use_nothing_of_the_weights_before,
    test_samples_are_those_of_the_engine_that_waits,
)
from own_environments import Dawdles
from rollout_harness import Rollout

__all__ = [
    "test_a_version_is_taken_between_two_tokens",
    "test_commands_run_beside_each_other_until_one_says_otherwise",
    "test_nothing_goes_on_with_partial_weights",
    "test_others_go_on_while_an_answer_is_awaited",
    "test_otherwise_what_was_begun_is_given_up",
    "test_requests_added_later_use_nothing_of_the_weights_before",
    "test_samples_are_those_of_the_engine_that_waits",
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Rollout] = []

    def make(environment: type, *, generation: dict[str, Any], **settings: Any) -> Rollout:
        path = f"{environment.__module__}.{environment.__qualname__}"
        folder = tmp_path / str(len(started))
        started.append(Rollout(folder, path, model=MODEL, generation=generation, **settings))
        return started[-1]

    yield make
    for rollout in started:
        rollout.service.close()


def test_a_command_without_groups_only_gives_up_others(start: Start) -> None:
    rollout = start(Dawdles, generation={"async_engine": True})
    rollout.start(rollout.group(0, range(3)))
    assert rollout.service.work()
    nothing = rollout.start()
    assert rollout.finish() == {}
    assert generated(rollout) == [nothing]
