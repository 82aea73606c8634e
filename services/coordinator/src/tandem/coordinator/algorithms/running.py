"""What the loop asks of an algorithm: prompts for the engines and batches for the trainers.

It is a pure function of the configuration, the step and the samples, which the scheduler's table of groups keeps:
a resumed run needs nothing of it but the number of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.common.messages import PromptGroup, Purpose, SampleScored, SamplingParameters
from tandem.coordinator.scheduler.events import DrawPrompts, GroupSize, SampleRecord
from tandem.samples.batch import Batch


class RunningAlgorithm(Protocol):
    """One algorithm's data, in and out."""

    notices: tuple[str, ...]
    """What a user should know of the data before the run begins, a line each."""

    @property
    def num_validation(self) -> int:
        """Prompts that a validation generates for; zero if it generates nothing."""
        ...

    @property
    def validation_parts(self) -> dict[str, int]:
        """Sequences of each part of the validation batch that is evaluated by itself, in order; empty if none is."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps that a whole run takes."""
        ...

    def sampling(self, purpose: Purpose) -> SamplingParameters:
        """Return how samples of this purpose are drawn."""
        ...

    def prompt_groups(self, step: int, purpose: Purpose, groups: Sequence[int]) -> tuple[PromptGroup, ...]:
        """Return these prompt groups of `step`."""
        ...

    def batch(
        self, step: int, purpose: Purpose, records: Sequence[SampleRecord] = ()
    ) -> tuple[Batch, dict[str, float]]:
        """Return the batch of `step`, and the metrics of the samples it is made from: those of `records`, in order."""
        ...

    def describe(self, samples: Sequence[SampleScored]) -> list[str]:
        """Describe validation samples, a line each."""
        ...

    def validation_metrics(self, samples: Sequence[SampleScored]) -> dict[str, float]:
        """Return the metrics of a validation's samples; none if it had none."""
        ...


def group_sizes(algorithm: RunningAlgorithm, drawn: DrawPrompts) -> tuple[GroupSize, ...]:
    """Return what each rollout group that is drawn asks of an engine."""
    longest = algorithm.sampling(drawn.purpose).max_new_tokens
    groups = algorithm.prompt_groups(drawn.step, drawn.purpose, drawn.groups)
    return tuple(GroupSize(num_samples=len(g.seeds), num_tokens=len(g.prompt_ids) + longest) for g in groups)
