"""How much longer a run will take: the same for the console and for the page."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.observe.run_folder.journal import StepRecord

NUM_RECENT = 20
"""Steps whose seconds say how long those to come take."""


def seconds_left(
    records: Sequence[StepRecord], last_step: int, since_s: float = 0.0, again: Sequence[StepRecord] = ()
) -> float | None:
    """Return how long the steps to come will take if they take what the latest did in the mean; None if none is done.

    A mean has its share of validations and checkpoints, which a median would leave out. The first step, in which
    everything warms up, counts only while there is no other. `since_s` have passed since the last one was done. Where
    none is done any more, steps that are done `again` took as long.
    """
    done = [record for record in (records or again)[-NUM_RECENT:] if record.step]
    recent = [record for record in done if record.step > 1] or done
    total_s = sum(record.seconds.get("total", 0.0) for record in recent)
    if not total_s:
        return None
    last_done = records[-1].step if records else 0
    return max(0.0, (last_step - last_done) * total_s / len(recent) - since_s)
