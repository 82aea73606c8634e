"""``checkpointing.checkpoint_must_save_by``: a run saves, and ends, before its time is over."""

from __future__ import annotations

import pytest

from tandem.common.errors import ConfigError
from tandem.config import build_config
from tandem.coordinator.loop.time_limit import TimeLimit, seconds_of

HOUR = "00:01:00:00"


def after_steps(*ends: float, limit: str = HOUR) -> tuple[TimeLimit, list[str | None]]:
    """Return a limit of a run that began at 100 s, and what it said at the end of each step."""
    found = TimeLimit(limit, 100.0)
    said = []
    for end in ends:
        found.committed(100.0 + end)
        said.append(found.why_over(100.0 + end))
    return found, said


def test_durations_are_days_hours_minutes_and_seconds() -> None:
    assert seconds_of("02:03:04:05") == 2 * 86400 + 3 * 3600 + 4 * 60 + 5


def test_no_step_is_begun_that_would_not_end_in_time() -> None:
    assert after_steps(1000.0, 2000.0)[1] == [None, None]
    _, said = after_steps(1000.0, 2000.0, 3000.0)
    assert said == [
        None,
        None,
        "checkpointing.checkpoint_must_save_by is 00:01:00:00, and 600 s are left, a step and a checkpoint have taken "
        "1000 s: saving, and ending",
    ]
    assert after_steps(*(100.0 * step for step in range(1, 35)))[1] == [None] * 34
    assert after_steps(*(100.0 * step for step in range(1, 36)))[1][-1] is not None, "100 s are left"


def test_the_time_of_a_checkpoint_is_kept_too() -> None:
    limit, _ = after_steps(100.0, 200.0)
    limit.copied(300.0)
    limit.published(450.0)
    limit.committed(100.0 + 3290.0)
    assert limit.why_over(100.0 + 3290.0) is not None
    limit, _ = after_steps(100.0, 200.0)
    assert limit.why_over(100.0 + 3599.0) is None
    said = limit.why_over(100.0 + 3600.0)
    assert said is not None
    assert "the step has taken longer than those before" in said
    assert limit.why_over(100.0 + 3700.0) is None, "said once: twice would end the run at once"


def test_a_run_does_a_step_and_who_asked_it_to_end_is_not_asked_again() -> None:
    limit = TimeLimit(HOUR, 100.0)
    assert limit.why_over(1e6) is None, "there is nothing to save"
    limit.committed(1e6)
    limit.give_up()
    assert limit.why_over(1e6) is None


@pytest.mark.parametrize("given", ["3:45:00", "an hour", "0:1:2:3"])
def test_other_forms_are_refused(given: str) -> None:
    settings = {
        "grpo": {},
        "policy": {"model_name": "model"},
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        "checkpointing": {"checkpoint_must_save_by": given},
    }
    with pytest.raises(ConfigError) as caught:
        build_config(settings)
    assert str(caught.value) == (
        f"configuration: checkpointing.checkpoint_must_save_by: '{given}' is malformed: expected "
        "days:hours:minutes:seconds, such as 00:03:45:00"
    )
