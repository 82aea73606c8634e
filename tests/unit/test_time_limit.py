"""``checkpointing.checkpoint_must_save_by``: a run saves, and ends, before its time is over."""

from __future__ import annotations

import signal

import pytest

from tandem.common.errors import ConfigError
from tandem.common.messages import CheckpointSaved, SaveCheckpoint
from tandem.config import build_config
from tandem.coordinator.loop.loop import PendingInterrupts
from tandem.coordinator.observers.finished_steps import TimeLimit, seconds_of
from tandem.observe.run_folder.journal import StepRecord

HOUR = "00:01:00:00"


class Run:
    """A run that begins at 100 s, with a limit; its clock is set by hand."""

    def __init__(self, limit: str = HOUR) -> None:
        self._now = 100.0
        self._said: list[str] = []
        self.limit = TimeLimit(limit, self._said.append, lambda: self._now)

    def said(self, at: float) -> str | None:
        """Return what the limit says so many seconds after the beginning."""
        self._now = 100.0 + at
        self.limit.show(None, None)  # type: ignore[arg-type]  # it looks at neither
        return self._said.pop() if self._said else None

    def step(self, end: float) -> str | None:
        """End a step; return what the limit says then."""
        self._now = 100.0 + end
        self.limit.committed(StepRecord(step=1, version=1, metrics={}, seconds={}))
        return self.said(end)

    def steps(self, *ends: float) -> list[str | None]:
        return [self.step(end) for end in ends]


def test_durations_are_days_hours_minutes_and_seconds() -> None:
    assert seconds_of("02:03:04:05") == 2 * 86400 + 3 * 3600 + 4 * 60 + 5


def test_no_step_is_begun_that_would_not_end_in_time() -> None:
    assert Run().steps(1000.0, 2000.0) == [None, None]
    assert Run().steps(1000.0, 2000.0, 3000.0) == [
        None,
        None,
        "checkpointing.checkpoint_must_save_by is 00:01:00:00, and 600 s are left, a step and a checkpoint have taken "
        "1000 s: saving, and ending",
    ]
    assert Run().steps(*(100.0 * step for step in range(1, 35))) == [None] * 34
    assert Run().steps(*(100.0 * step for step in range(1, 36)))[-1] is not None, "100 s are left"


def test_the_time_of_a_checkpoint_is_kept_too() -> None:
    run = Run()
    run.steps(100.0, 200.0)
    save = SaveCheckpoint(command_id=1, deadline_s=600.0, folder="checkpoint", step=2)
    for at in (300.0, 310.0):  # one of each rank
        run.limit.sent("trainer-0", save, at)
    for at in (400.0, 450.0):
        run.limit.answered("trainer-0", CheckpointSaved(command_id=1, num_bytes=1), at)
    assert run.step(3290.0) is not None, "310 s are left; a step and a checkpoint have taken 3,090 s and 150 s"
    run = Run()
    run.steps(100.0, 200.0)
    assert run.said(3599.0) is None
    said = run.said(3600.0)
    assert said is not None
    assert "the step has taken longer than those before" in said
    assert run.said(3700.0) is None, "said once: twice would end the run at once"


def test_a_checkpoint_that_is_begun_later_is_timed_on_its_own() -> None:
    run = Run()
    run.steps(*(10.0 * step for step in range(1, 6)))
    for step, begun in ((1, 100.0), (2, 2000.0)):
        command = SaveCheckpoint(command_id=step, deadline_s=600.0, folder="checkpoint", step=step)
        run.limit.sent("trainer-0", command, begun)
        run.limit.answered("trainer-0", CheckpointSaved(command_id=step, num_bytes=1), begun + 20.0)
    assert run.said(3579.0) is None
    assert run.said(3581.0) is not None, "a checkpoint has taken 20 s"


def test_a_run_does_a_step_and_who_asked_it_to_end_is_not_asked_again() -> None:
    assert Run().said(1e6) is None, "there is nothing to save"
    interrupts = PendingInterrupts()
    interrupts.ask("its time is over")
    assert interrupts.take() == "its time is over"
    assert not interrupts.were_heard
    interrupts.hear(signal.SIGINT)
    interrupts.ask("its time is over")
    assert interrupts.were_heard
    assert "press Ctrl-C again" in str(interrupts.take())
    assert interrupts.take() is None, "a second request would end the run at once"


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
