"""The interface of an algorithm to the loop: prompts for the engines and batches for the trainers.

An algorithm is a pure function of the configuration, the step and the samples, which the scheduler's table of groups
keeps. A resumed run needs only the number of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Never, Protocol

from tandem.common.messages import PromptGroup, Purpose, SampleScored, SamplingParameters
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.observe.run_folder.journal import StepRecord
from tandem.samples.batch import SampleBatch


class RunningAlgorithm(Protocol):
    """The data of one algorithm, in and out."""

    notices: tuple[str, ...]
    """Notes on the data for the user before the run begins, one a line."""

    def keep_media(self) -> None:
        """Keep in the run's folder what the data has besides texts. Raises `RunFolderError`."""
        ...

    @property
    def num_validation(self) -> int:
        """Prompts that a validation generates for; zero if it generates nothing."""
        ...

    @property
    def validation_parts(self) -> dict[str, int]:
        """Sequences of each part of the validation batch that is evaluated separately, in order; empty if none is."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps of a whole run."""
        ...

    def resume(self, read_steps: Callable[[], Sequence[StepRecord]]) -> None:
        """Continue after the finished steps of a run, which `read_steps` reads from its journal."""
        ...

    def sampling(self, purpose: Purpose) -> SamplingParameters:
        """Return the sampling parameters for this purpose."""
        ...

    def prompt_groups(self, step: int, purpose: Purpose, groups: Sequence[int]) -> tuple[PromptGroup, ...]:
        """Return these prompt groups of `step`."""
        ...

    def batch(
        self, step: int, purpose: Purpose, records: Sequence[SampleRecord] = ()
    ) -> tuple[SampleBatch, dict[str, float]]:
        """Return the batch of `step` and the metrics of its samples, which are those of `records`, in order."""
        ...

    def describe(self, samples: Sequence[SampleScored]) -> list[str]:
        """Describe validation samples, one a line."""
        ...

    def validation_metrics(self, samples: Sequence[SampleScored]) -> dict[str, float]:
        """Return the metrics of a validation's samples; none if it had none."""
        ...


class WithoutGeneration:
    """The answers of every algorithm for which nothing is generated."""

    def keep_media(self) -> None:
        """Do nothing: the data is text, or is kept already."""

    @property
    def num_validation(self) -> int:
        """Prompts to generate for validation: none."""
        return 0

    def resume(self, read_steps: Callable[[], Sequence[StepRecord]]) -> None:
        """Do nothing: what a step draws depends on no earlier one."""

    def sampling(self, purpose: Purpose) -> Never:
        """Fail: no samples are drawn."""
        raise AssertionError("nothing is generated")

    def prompt_groups(self, step: int, purpose: Purpose, groups: Sequence[int]) -> Never:
        """Fail: no samples are drawn."""
        raise AssertionError("nothing is generated")

    def describe(self, samples: Sequence[SampleScored]) -> list[str]:
        """Return nothing: there are no samples."""
        return []

    def validation_metrics(self, samples: Sequence[SampleScored]) -> dict[str, float]:
        """Return nothing: there are no samples."""
        return {}
