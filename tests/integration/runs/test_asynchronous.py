"""Asynchronous runs: whole ones with everything on, and their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.processes.held_processes import lines_of
from tests.harness.runs.asynchronous_runs import ASYNCHRONOUS, TALKING, as_ppo, check_steps, held_run
from tests.harness.runs.by_hand import in_folder
from tests.harness.runs.running import (
    merged,
    write_config,
)

IN_FLIGHT: dict[str, Any] = {
    "grpo": {
        "use_dynamic_sampling": True,
        "batch_multiplier": 1.25,
        "async_grpo": {
            "max_trajectory_age_steps": 3,
            "in_flight_weight_updates": True,
            "recompute_kv_cache_after_weight_updates": True,
        },
    },
    "policy": {"generation": {"async_engine": True, "transformers_cfg": {"num_slots": 8}}},
    "checkpointing": {"save_period": 1, "keep_top_k": None},
}


@pytest.fixture(scope="module", params=["grpo", "ppo"])
def in_flight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with engines that take weights while they generate, and all that can be on."""
    folder, config = tmp_path_factory.mktemp("in_flight"), merged(merged(ASYNCHRONOUS, IN_FLIGHT), TALKING)
    if request.param == "ppo":
        config = as_ppo(config)
    with in_folder(folder), held_run(write_config(config)) as run:
        assert run.wait() == 0, run.output()
    return folder


def test_a_run_in_flight_does_every_step_with_samples_that_are_young_enough(in_flight: Path) -> None:
    check_steps(in_flight / "run", age=3)
    with in_folder(in_flight):
        sent, trained = lines_of("sent"), lines_of("trained")
    mixed = [sample for sample in sent if sample["oldest"] < sample["newest"]]
    assert mixed, "some requests went on with new weights"
    assert all(sample["purpose"] == "train" for sample in mixed)
    validated = [sample for sample in sent if sample["purpose"] == "validate"]
    assert {sample["step"] for sample in validated} == {3, 6, 8}
    assert all(sample["oldest"] == sample["newest"] == sample["step"] for sample in validated)
    beside = [any(step["began"] < sample["at"] < step["ended"] for sample in sent) for step in trained[:-1]]
    assert sum(beside) > len(beside) / 2, "engines generate while a step trains"


def test_a_token_has_the_probability_that_the_weights_of_its_version_give_it(in_flight: Path) -> None:
    """Computed by plain transformers: what engines say of tokens, and what trainers make of it."""
    import torch
    import transformers

    from tests.harness.trainers.reference import logprobs_of

    folders = {v: in_flight / f"run/checkpoints/step_{v}/policy" for v in range(1, 8)} | {
        0: in_flight / "step_0/policy"
    }
    models = {v: transformers.AutoModelForCausalLM.from_pretrained(path) for v, path in folders.items()}
    num_mixed = 0
    for step in range(1, 9):
        arrays = np.load(in_flight / f"trained_{step}.npz")
        ends = np.cumsum(arrays["lengths_S"])
        expected_weights = []
        for end, length in zip(ends, arrays["lengths_S"], strict=True):
            part = slice(end - length, end)
            token_ids = torch.from_numpy(arrays["token_ids_T"][part].astype(np.int64))
            mask, versions = arrays["loss_mask_T"][part][1:], arrays["versions_T"][part][1:]
            said = arrays["generation_logprobs_T"][part][1:]
            assert set(versions[~mask]) <= {-1}
            made = versions[mask]
            assert (np.diff(made) >= 0).all(), "never back to older weights"
            assert step - 4 <= made.min() <= made.max() <= step - 1
            num_mixed += made.min() < made.max()
            with torch.no_grad():
                known = {v: logprobs_of(models[v], token_ids).numpy() for v in {*made.tolist(), step - 1}}
            for version in set(made.tolist()):
                chosen = mask & (versions == version)
                np.testing.assert_allclose(said[chosen], known[version][chosen], rtol=0, atol=2e-4)
            expected_weights.append(np.exp(known[step - 1] - said)[mask])
        found, expected = np.sort(arrays["weights"]), np.sort(np.concatenate(expected_weights))
        np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert num_mixed, "some samples have tokens of two versions"
