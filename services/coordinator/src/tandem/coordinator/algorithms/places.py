"""The places of the stream of problems that rollout groups are drawn from.

The stream goes on where it stopped: each batch of groups takes the next places, so that nothing is skipped, whatever
dynamic sampling draws. The order of draws is fixed, and no arrival decides it: while step `s` is in progress, the first
batches of the steps up to `s` plus the age have been drawn, and then come the further batches of `s`. A place therefore
depends on how many batches earlier steps took, which is known when it is drawn, and which the journal has.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.config import Config
from tandem.observe.run_folder.journal import StepRecord

NUM_BATCHES = "dynamic_sampling_num_gen_batches"
"""Metric of a step: the batches of groups that it drew."""


class PlaceUnknown(LookupError):
    """The error of a place that depends on a step which has not drawn all its batches yet."""


class StreamPlaces:
    """The places of all groups of a run with dynamic sampling."""

    def __init__(self, config: Config) -> None:
        section = config.rollout_section
        self._size = section.num_prompts_per_batch
        self._age = config.max_trajectory_age_steps
        self._num_further = [0]
        """For each step that has all its batches, those after the first that it and all earlier steps drew; the first
        entry is before step 1."""

    def of(self, step: int, group: int) -> int:
        """Return the place of a group. Raise `PlaceUnknown` if it depends on a step that still draws."""
        batch, place = divmod(group, self._size)
        if batch == 0:
            num_earlier = step - 1 + self._further_until(step - 1 - self._age)
        else:
            num_earlier = step + self._age + self._further_until(step - 1) + batch - 1
        return num_earlier * self._size + place

    def finish(self, step: int, num_groups: int) -> None:
        """Note that a step has all its groups."""
        del self._num_further[step:]
        self._num_further.append(self._num_further[step - 1] + num_groups // self._size - 1)

    def resume(self, steps: Iterable[StepRecord]) -> None:
        """Go on after the steps of a journal, in order."""
        self._num_further = [0]
        for record in steps:
            if record.step > 0:
                self.finish(record.step, round(record.metrics.get(NUM_BATCHES, 1.0)) * self._size)

    def _further_until(self, step: int) -> int:
        if step <= 0:
            return 0
        if step >= len(self._num_further):
            raise PlaceUnknown(f"step {step} has yet to draw")
        return self._num_further[step]
