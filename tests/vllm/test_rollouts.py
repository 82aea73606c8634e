"""The rollout service with the real vLLM: the tests of the embedded engine, which must hold for this one, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from async_rollouts_cases import (
    MODEL,
    test_a_version_is_taken_between_two_tokens,
    test_commands_run_beside_each_other_until_one_says_otherwise,
    test_nothing_goes_on_with_partial_weights,
    test_others_go_on_while_an_answer_is_awaited,
    test_otherwise_what_was_begun_is_given_up,
    test_requests_added_later_use_nothing_of_the_weights_before,
    test_samples_are_those_of_the_engine_that_waits,
)
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
VLLM = {"backend": "vllm", "vllm_kwargs": {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 5}}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rollout]]:
    """Start a service whose engine is vLLM, in place of the fixture that these tests have elsewhere."""
    started: list[Rollout] = []

    def make(environment: type, *, generation: dict[str, Any], **settings: Any) -> Rollout:
        path = f"{environment.__module__}.{environment.__qualname__}"
        folder = tmp_path / str(len(started))
        started.append(Rollout(folder, path, model=MODEL, generation={**VLLM, **generation}, **settings))
        return started[-1]

    yield make
    for rollout in started:
        rollout.service.close()
