"""vLLM beside training and in turns with it: the same results to the bit, and a cache only where nobody needs room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.by_hand import TRAINERS, assert_same_results, last_weights, placed_runs, refits_of
from tests.harness.runs.running import merged, steps_of

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


@pytest.fixture(scope="module", params=TRAINERS)
def trainers(request: pytest.FixtureRequest) -> str:
    """Return the name of the backend and its size."""
    return str(request.param)


@pytest.fixture(scope="module")
def runs(trainers: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of two runs that differ in nothing but where they run."""
    return placed_runs(tmp_path_factory.mktemp("placement"), merged(CONFIG, TRAINERS[trainers]))


def test_the_results_are_the_same(runs: dict[str, Path]) -> None:
    assert len(steps_of(runs["colocated"])) == NUM_STEPS
    assert_same_results(runs["disjoint"], runs["colocated"], same_batches=True)


def test_no_engine_reads_in_place_what_trains_elsewhere(trainers: str, runs: dict[str, Path]) -> None:
    colocated, disjoint = ([sum(refit.num_bytes.values()) for refit in refits_of(run)] for run in runs.values())
    assert disjoint == [sum(map(len, last_weights(runs["disjoint"]).values()))] * (NUM_STEPS + 1)
    # Of two ranks of FSDP each holds a part of every tensor; those of Megatron-Core have all of each norm.
    assert max(colocated) < min(disjoint) or trainers == "2-trainers"


def test_an_engine_that_takes_turns_holds_no_cache_while_others_train(runs: dict[str, Path]) -> None:
    """vLLM writes all of its cache when it starts, and the first sleep gives that back."""
    asleep, awake = (
        [step.metrics["memory_training_engine_gb"] for step in steps_of(runs[placement])]
        for placement in ("colocated", "disjoint")
    )
    assert max(asleep) < min(awake) - 0.8 * CACHE_BYTES / 1e9
