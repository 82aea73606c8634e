"""The recorded samples of a run, as a program reads them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem.common.messages import Purpose
from tandem.samples import recorded_shards, sample_record
from tandem.samples.sample_files import FOLDER


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample that a step was trained on or validated on."""

    step: int
    """Step that it was trained on, or after which it was generated for validation."""
    group: int
    """Rollout group within the step: the samples of one prompt."""
    sample: int
    """Index within the group."""
    problem_id: str
    """Identifier of its row in the data."""
    prompt: str
    """Prompt as the model saw it, special tokens included."""
    response: str
    """Text after the prompt: the policy's responses, and what an environment inserted between them."""
    reference: str
    """Reference answer; empty if there is none."""
    reward: float
    components: dict[str, float]
    """Components of the reward: what each reward function returned, by its name."""
    correct: bool
    """Whether it counts as solved."""
    advantage: float | None
    """Advantage; None where the sample was not trained on, as in validation."""
    finish_reason: str
    """``stop``, ``length`` or ``turns``."""
    num_tokens: int
    """Length of the whole sequence."""
    failure: str
    """Description of what went wrong with its reward; empty if nothing did."""


def read_samples(run_folder: Path, step: int | None, run_id: str, purpose: Purpose) -> list[Sample]:
    """Return the samples of a step, or of the newest recorded one. Raise `SamplesError` if they cannot be read."""
    folder = run_folder / FOLDER
    if step is None:
        steps = recorded_shards.steps(folder, purpose)
        if not steps:
            return []
        step = steps[-1]
    return [_sample(recorded) for recorded in recorded_shards.read_step(folder, step, run_id, purpose)]


def _sample(recorded: sample_record.RecordedSample) -> Sample:
    scored = recorded.scored
    return Sample(
        step=recorded.step,
        group=scored.group,
        sample=scored.sample,
        problem_id=recorded.problem_id,
        prompt=recorded.prompt,
        response=scored.response,
        reference=recorded.answer,
        reward=scored.reward,
        components=dict(scored.components),
        correct=scored.correct,
        advantage=recorded.advantage,
        finish_reason=scored.finish_reason,
        num_tokens=scored.num_tokens,
        failure=scored.failure,
    )
