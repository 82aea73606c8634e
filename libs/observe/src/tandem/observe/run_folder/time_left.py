"""The remaining time of a run, for the console and for the page."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.observe.run_folder.journal import StepRecord

NUM_RECENT = 20
"""Number of recent steps from which the remaining time is estimated."""


def seconds_left(
    records: Sequence[StepRecord], last_step: int, since_s: float = 0.0, again: Sequence[StepRecord] = ()
) -> float | None:
    """Return the remaining time, estimated from the mean of the latest steps; None if no step is done.

    A mean includes validations and checkpoints, which a median would ignore. The first step, in which everything warms
    up, counts only while it is the only one. `since_s` is the time since the last step was done. If all steps are being
    repeated, the estimate uses `again`, their earlier records.
    """
    done = [record for record in (records or again)[-NUM_RECENT:] if record.step]
    recent = [record for record in done if record.step > 1] or done
    total_s = sum(record.seconds.get("total", 0.0) for record in recent)
    if not total_s:
        return None
    last_done = records[-1].step if records else 0
    return max(0.0, (last_step - last_done) * total_s / len(recent) - since_s)
