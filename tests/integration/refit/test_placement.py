"""Training and generation on the same devices, in turns, and on devices of their own: the same results to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.by_hand import TRAINERS, assert_same_results, last_weights, placed_runs, refits_of
from tests.harness.runs.running import coordinator, merged, steps_of

NUM_STEPS = 3
PLACEMENTS: dict[str, Any] = {
    # A key-value cache that shows: 2 tensors, 4 layers, 64 slots, 16 heads, and a page of memory for each head's keys.
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 8, "max_num_steps": NUM_STEPS, "val_period": 3},
    "policy": {
        "new_model": {
            "config": {
                "num_hidden_layers": 4,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "head_dim": 32,
            }
        },
        "train_global_batch_size": 64,
        "generation": {"transformers_cfg": {"num_slots": 64}},
    },
    "checkpointing": {"save_period": NUM_STEPS},
}
CACHE_GB = 2 * 4 * 64 * 16 * 4096 / 1e9


PARTS = {"1-trainer": (), "2-trainers": ("",), "megatron-tp2": ("_proj.weight",)}
"""How names end of which no trainer has all. Megatron-Core has norms, and an embedding of 17 rows, on one rank."""


@pytest.fixture(scope="module", params=TRAINERS)
def trainers(request: pytest.FixtureRequest) -> str:
    """Return the name of the backend and its size."""
    return str(request.param)


@pytest.fixture(scope="module")
def runs(trainers: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of two runs that differ in nothing but where they run."""
    return placed_runs(tmp_path_factory.mktemp("placement"), merged(PLACEMENTS, TRAINERS[trainers]))


def test_the_results_are_the_same(runs: dict[str, Path]) -> None:
    assert len(steps_of(runs["colocated"])) == NUM_STEPS
    assert_same_results(runs["disjoint"], runs["colocated"], same_batches=True)


def test_an_engine_reads_in_place_what_one_trainer_has_whole_if_they_take_turns(
    trainers: str, runs: dict[str, Path]
) -> None:
    sizes = {name: len(tensor) for name, tensor in last_weights(runs["disjoint"]).items()}
    in_parts = sum(size for name, size in sizes.items() if name.endswith(PARTS[trainers]))
    for placement, copied in (("colocated", in_parts), ("disjoint", sum(sizes.values()))):
        refits = refits_of(runs[placement])
        assert [sum(refit.num_bytes.values()) for refit in refits] == [copied] * (NUM_STEPS + 1)
        assert all(refit.digest for refit in refits), "verified"


def test_an_engine_that_takes_turns_holds_no_cache_while_others_train(runs: dict[str, Path]) -> None:
    for placement, given_back in (("colocated", True), ("disjoint", False)):
        for step in steps_of(runs[placement]):
            cache = step.metrics["memory_generation_engine_gb"] - step.metrics["memory_training_engine_gb"]
            assert cache > 0.9 * CACHE_GB if given_back else cache < 0.5 * CACHE_GB, (placement, step.step, cache)


def test_the_report_shows_peak_memory(runs: dict[str, Path]) -> None:
    text = coordinator("report", runs["colocated"]).stdout
    lines = text[text.index("peak memory, GB") :].splitlines()[:3]
    assert lines[0].split() == ["peak", "memory,", "GB", "generation", "training", "refit"]
    (trainer, *of_trainer), (engine, *of_engine) = (line.split() for line in lines[1:])
    assert (trainer, engine) == ("trainer", "engine")
    assert all(float(number) > 0.05 for number in [*of_trainer[:2], *of_engine]), "torch alone is that large"
