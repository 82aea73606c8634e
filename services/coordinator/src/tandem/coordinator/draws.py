"""Draws: for which prompt groups a step generates. Pure, like the plan.

Without dynamic sampling a step generates once, for as many groups as it trains on. With it (DAPO, Yu et al. 2025,
arXiv:2503.14476, section 3.2) groups that teach nothing do not count, and it goes on, a batch of groups at a time,
until enough others are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.common.errors import SamplingExhausted
from tandem.common.messages import SampleScored, SamplesFinished
from tandem.coordinator.decisions import Action, DiscardSamples, Phase, RunShape

Teaches = Callable[[Sequence[SampleScored]], bool]
"""Whether training can learn something from the samples of a group."""


class Draws:
    """The groups of the step in progress, numbered from zero."""

    def __init__(self, shape: RunShape, teaches: Teaches) -> None:
        self._shape = shape
        self._teaches = teaches
        self._num_batches = 0
        self._samples: dict[int, dict[int, SampleScored]] = {}
        """By group and place in it; only with dynamic sampling."""

    def begin(self) -> range:
        """Return the groups to begin a step with."""
        self._num_batches = 0
        self._samples = {}
        return self._next()

    def take_samples(self, finished: SamplesFinished) -> None:
        """Take note of samples, which may be a repetition."""
        if self._shape.dynamic_sampling is not None and finished.purpose == "train":
            for sample in finished.samples:
                self._samples.setdefault(sample.group, {})[sample.sample] = sample

    def heed(self, actions: Sequence[Action]) -> None:
        """Forget what the plan has decided to discard."""
        for action in actions:
            if isinstance(action, DiscardSamples) and action.purpose == "train":
                for group in action.groups:
                    self._samples.pop(group, None)

    def more(self) -> range:
        """Return the groups to go on with, now that all before are there; none if the step has enough.

        Raises `SamplingExhausted` if it does not, and must not go on.
        """
        dynamic = self._shape.dynamic_sampling
        if dynamic is None:
            return range(0)
        found = sum(self._teaches(list(samples.values())) for samples in self._samples.values())
        if found >= self._shape.num_groups:
            return range(0)
        if self._num_batches == dynamic.max_batches:
            raise SamplingExhausted(
                "coordinator",
                Phase.GENERATING.value,
                f"the samples of {dynamic.max_batches} x {dynamic.num_groups} prompts have given {found} groups whose "
                f"rewards differ, and a step needs {self._shape.num_groups}: the problems are too easy or too hard, or "
                "grpo.dynamic_sampling_max_gen_batches too low",
            )
        return self._next()

    def _next(self) -> range:
        dynamic = self._shape.dynamic_sampling
        size = self._shape.num_groups if dynamic is None else dynamic.num_groups
        self._num_batches += 1
        return range((self._num_batches - 1) * size, self._num_batches * size)
