"""vLLM beside training and in turns with it: the same results to the bit, and a cache only where nobody needs room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.by_hand import assert_same_results, placed_runs, refits_of
from tests.integration.harness import steps_of

NUM_STEPS = 3
CACHE_BYTES = 2**28
CONFIG: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
    "policy": {
        "new_model": {"config": {"hidden_size": 64, "head_dim": 32}},
        "train_micro_batch_size": 4,
        "generation": {"backend": "vllm", "vllm_kwargs": {"kv_cache_memory_bytes": CACHE_BYTES}},
    },
    "checkpointing": {"metric_name": "reward", "save_period": NUM_STEPS},
    "cluster": {"deadlines": {"build_s": 240.0}},
}


@pytest.fixture(scope="module", params=[1, 2], ids=lambda trainers: f"{trainers}-trainers")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of two runs that differ in nothing but where they run."""
    return placed_runs(tmp_path_factory.mktemp("placement"), CONFIG, request.param)


def test_the_results_are_the_same(runs: dict[str, Path]) -> None:
    assert len(steps_of(runs["colocated"])) == NUM_STEPS
    assert_same_results(runs["disjoint"], runs["colocated"])


def test_no_engine_reads_in_place_what_trains_elsewhere(runs: dict[str, Path]) -> None:
    colocated, disjoint = ([sum(refit.num_bytes.values()) for refit in refits_of(run)] for run in runs.values())
    # Of two trainers each holds a part of every tensor, which an engine cannot read in place.
    is_sharded = len({link.partition(">")[0] for link in refits_of(runs["disjoint"])[0].num_bytes}) == 2
    assert is_sharded or max(colocated) < min(disjoint)


def test_an_engine_that_takes_turns_holds_no_cache_while_others_train(runs: dict[str, Path]) -> None:
    """vLLM writes all of its cache when it starts, and the first sleep gives that back."""
    asleep, awake = (
        [step.metrics["memory_training_engine_gb"] for step in steps_of(runs[placement])]
        for placement in ("colocated", "disjoint")
    )
    assert max(asleep) < min(awake) - 0.8 * CACHE_BYTES / 1e9
