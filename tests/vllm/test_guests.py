"""Guests of a rollout with the real vLLM: the tests of the embedded engine, which must hold for this one, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from async_rollouts_cases import MODEL
from guests_cases import (
    Start,
    test_guests_are_told_what_is_wrong_and_whom_they_talk_to,
    test_guests_run_beside_samples_where_these_join_and_leave_at_any_time,
    test_samples_are_the_same_to_the_bit_whoever_asks_meanwhile,
    test_weights_change_in_the_middle_of_an_answer,
)
from own_environments import Length
from rollout_harness import Rollout

__all__ = [
    "test_guests_are_told_what_is_wrong_and_whom_they_talk_to",
    "test_guests_run_beside_samples_where_these_join_and_leave_at_any_time",
    "test_samples_are_the_same_to_the_bit_whoever_asks_meanwhile",
    "test_weights_change_in_the_middle_of_an_answer",
]
SIZES = {**MODEL, "max_position_embeddings": 256}
VLLM = {"backend": "vllm", "vllm_kwargs": {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 5}}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Rollout] = []

    def make(*, external_requests: bool = True, **generation: Any) -> Rollout:
        environment = f"{Length.__module__}.{Length.__qualname__}"
        settings = {**VLLM, "expose_http_server": external_requests, **generation}
        folder = tmp_path / str(len(started))
        started.append(Rollout(folder, environment, total=200, model=SIZES, generation=settings))
        return started[-1]

    yield make
    for rollout in started:
        rollout.service.close()
