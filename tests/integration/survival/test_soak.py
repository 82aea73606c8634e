"""A run of hundreds of steps takes as long for each at its end as at its beginning."""

from __future__ import annotations

from typing import Any

from tests.harness.runs.running import coordinator, steps_of, write_config

NUM_STEPS = 240
QUICK = 5
"""The place of the step that counts among the quickest of a quarter."""
SOAK: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
    "checkpointing": {"enabled": False},
    "policy": {"optimizer": {"kwargs": {"lr": 0.0}}},  # or responses become longer
    "env": {"digits": {"class": "digits.Digits", "num_workers": 2}},
    "logger": {"samples": "off"},
}


def test_seconds_a_step_stay_flat() -> None:
    """A wake-up that is lost, a queue or a table that grows: each made steps slow for good, some way into a run."""
    ended = coordinator("up", write_config(SOAK))
    assert ended.returncode == 0, ended.stderr
    steps = [step for step in steps_of() if step.step]
    assert len(steps) == NUM_STEPS
    for phase in ("generation", "policy_training", "total"):
        quarters = [
            sorted(step.seconds[phase] for step in steps[first : first + NUM_STEPS // 4])[QUICK]
            for first in range(0, NUM_STEPS, NUM_STEPS // 4)
        ]
        # A machine that has other work may be slow for a while, but not in each step; the lost wake-up was ten times.
        assert max(quarters[1:]) < 4 * quarters[0] + 0.05, (phase, quarters)
