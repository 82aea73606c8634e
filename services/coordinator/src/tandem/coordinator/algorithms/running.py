"""What the loop asks of an algorithm: prompts for the engines and batches for the trainers.

It is a pure function of the configuration, the step and the samples it was given, so a resumed run needs nothing of
it but the number of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.common.messages import PromptGroup, Purpose, SamplesFinished, SamplingParameters
from tandem.coordinator.samples import StepBatch
from tandem.coordinator.scheduler.events import DrawPrompts, GroupSize


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

    def take_samples(self, rollout: str, finished: SamplesFinished) -> Sequence[str]:
        """Keep what is known of samples that a rollout has finished; return what a user should know of them."""
        ...

    def discard_samples(self, step: int, purpose: Purpose, groups: Sequence[int]) -> None:
        """Forget the samples of these groups: others will come in their place."""
        ...

    def batch(self, step: int, purpose: Purpose) -> tuple[StepBatch, dict[str, float]]:
        """Return the batch of `step` and the metrics of the samples it was made from."""
        ...

    def validation_examples(self, step: int, count: int) -> list[str]:
        """Describe the first `count` validation samples of `step`, a line each; none if it was not validated."""
        ...

    def finish_step(self, step: int) -> dict[str, float]:
        """Forget the step's samples; return the metrics of its validation samples, if it had any."""
        ...


def group_sizes(algorithm: RunningAlgorithm, drawn: DrawPrompts) -> tuple[GroupSize, ...]:
    """Return what each rollout group that is drawn asks of an engine."""
    longest = algorithm.sampling(drawn.purpose).max_new_tokens
    groups = algorithm.prompt_groups(drawn.step, drawn.purpose, drawn.groups)
    return tuple(GroupSize(num_samples=len(g.seeds), num_tokens=len(g.prompt_ids) + longest) for g in groups)
