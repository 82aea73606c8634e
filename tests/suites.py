"""The suites that `tox` runs, and which tests each has: ``python -m tests.suites NAME [what pytest takes]`` runs one.

`tox` alone runs `unit` and `integration`: what protects every part, a test of each kind. The others are as many again,
for what a change elsewhere seldom breaks; CI runs them after `tox`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
SUITES: dict[str, tuple[str, ...]] = {
    "unit": ("tests/unit",),
    "integration": (
        "tests/protocol",
        "tests/integration/config",
        "tests/integration/refit",
        # What a user sees of a run.
        "tests/integration/observe/test_console.py",
        "tests/integration/observe/test_health.py",
        "tests/integration/observe/test_mlflow.py",
        "tests/integration/observe/test_monitoring.py",
        "tests/integration/observe/test_page.py",
        "tests/integration/observe/test_wandb.py",
        # Engines, and what scores samples.
        "tests/integration/rollout/test_async_engine.py",
        "tests/integration/rollout/test_rewards.py",
        "tests/integration/rollout/test_samples_missing.py",
        "tests/integration/rollout/test_several_environments.py",
        # Whole runs: synchronous and asynchronous, with and without samples, with each backend.
        "tests/integration/runs/test_asynchronous.py",
        "tests/integration/runs/test_bad_words.py",
        "tests/integration/runs/test_dapo.py",
        "tests/integration/runs/test_dpo_run.py",
        "tests/integration/runs/test_loaded_run.py",
        "tests/integration/runs/test_megatron_run.py",
        "tests/integration/runs/test_packed_run.py",
        "tests/integration/runs/test_plain_path.py",
        "tests/integration/runs/test_run.py",
        "tests/integration/runs/test_saving.py",
        # Of each backend's numbers a file.
        "tests/integration/models/test_scoring.py",
        "tests/integration/trainer/test_dtensor.py",
        "tests/integration/trainer/test_large_tensors.py::test_logits_never_all_exist",
        "tests/integration/trainer/test_megatron.py",
        "tests/integration/trainer/test_checkpoints.py::test_a_damaged_checkpoint_is_refused",
        # Of what survives what, a test of each kind.
        "tests/integration/runs/test_losses.py::test_ctrl_c_saves_and_the_run_goes_on_from_there",
        "tests/integration/runs/test_losses.py::test_kill_9_of_the_coordinator_leaves_nothing",
        "tests/integration/runs/test_losses.py::test_trainers_may_die_at_any_moment",
        "tests/integration/survival/test_members_only.py",
        "tests/integration/survival/test_join.py::test_nodes_have_the_results_of_one",
        "tests/integration/survival/test_elastic.py"
        "::test_engines_that_come_and_go_leave_weights_as_they_would_have_been",
        "tests/integration/survival/test_resumed_samples.py"
        "::test_a_killed_run_does_again_what_it_did_without_generating",
        "tests/integration/survival/test_lost_for_cause.py"
        "::test_a_rollout_that_lies_about_its_samples_is_shut_out_by_name_and_replaced",
    ),
    "runs": (
        "tests/integration/observe",
        "tests/integration/rollout",
        "tests/integration/runs",
        "tests/integration/config/test_docs.py",
        "tests/integration/config/test_hub.py",
        "tests/integration/config/test_quickstart.py",
        "tests/integration/config/test_readme.py",
    ),
    "weights": (
        "tests/integration/refit/test_difference_cases.py",
        "tests/integration/refit/test_difference_runs.py",
        "tests/integration/refit/test_differences.py",
        "tests/integration/refit/test_dtensor_weights.py",
        "tests/integration/refit/test_megatron_weights.py",
        "tests/integration/refit/test_tcp_group.py",
        "tests/integration/refit/test_transports_hosts.py",
    ),
    "numbers": (
        "tests/integration/models",
        "tests/integration/trainer",
    ),
    "models": ("tests/models",),
    "survival": (
        "tests/chaos",
        "tests/fuzz",
        "tests/integration/hub",
        "tests/integration/survival",
        "tests/page",
    ),
    "tinker": ("tests/tinker",),
    "families": ("tests/families", "tests/environments"),
    "vllm": ("tests/vllm",),
    "gpu-simulated": (
        "tests/gpu",
        "tests/simulated_gpu",
        "tests/unit/test_digest_task.py",
    ),
    "slurm": ("tests/slurm",),
    "ray": ("tests/on_ray",),
    "s3": ("tests/on_s3",),
}
"""Folders, files and tests of each suite. What is named more closely belongs there and not to the folder's suite."""
TWICE = ("tests/unit/test_digest_task.py",)
"""What runs with one device in one suite, and with another in the other."""

ACROSS = {"megatron": ("tests/unit/test_*megatron*.py", "tests/integration/**/test_*megatron*.py")}
"""What runs again with other releases of a package, whichever suites its files are in."""


def places() -> dict[str, str]:
    """Return the suite of each folder, file and test that is named, but those that are in two."""
    return {place: suite for suite, named in SUITES.items() for place in named if place not in TWICE}


def suite_of(file: str) -> str:
    """Return the suite of a test file, by its path from the root."""
    named = places()
    nearest = max((place for place in named if Path(file).is_relative_to(place)), key=len)
    return named[nearest]


def arguments(suite: str) -> list[str]:
    """Return the folders, files and tests of a suite, and those within its folders that are another's, for pytest."""
    if suite in ACROSS:
        return sorted(str(path.relative_to(ROOT)) for pattern in ACROSS[suite] for path in ROOT.glob(pattern))
    others = {place for place, other in places().items() if other != suite}
    inside = [place for place in others if any(_is_within(place, own) for own in SUITES[suite])]
    left_out = [("--deselect" if "::" in place else "--ignore", place) for place in sorted(inside)]
    return [*SUITES[suite], *(word for pair in left_out for word in pair)]


def _is_within(place: str, folder: str) -> bool:
    """Tell whether a folder, file or test lies in a folder or file."""
    return place != folder and Path(place.replace("::", "/")).is_relative_to(folder)


def main() -> NoReturn:
    """Become pytest."""
    suite, *rest = sys.argv[1:]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments(suite), *rest])


if __name__ == "__main__":
    main()
