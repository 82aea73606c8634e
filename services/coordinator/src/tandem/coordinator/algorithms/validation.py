"""Validation by generating: the metrics of its samples, and the lines that describe them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.common.messages import SampleScored
from tandem.common.values.texts import question_text
from tandem.config import Config
from tandem.coordinator.algorithms.extra_metrics import failure_metrics, metrics_by_origin, turn_metrics
from tandem.samples.data_sets import EncodedProblem
from tandem.samples.images.markers import shown


def validation_metrics(
    config: Config, problems: Sequence[EncodedProblem], samples: Sequence[SampleScored]
) -> dict[str, float]:
    """Return the metrics of a validation's samples of these problems."""
    if not samples:
        return {}
    counted = [sample for sample in samples if not sample.dropped]
    scores: dict[str, float] = {}
    if counted:
        scores["val_reward"] = float(np.mean([sample.reward for sample in counted]))
        scores["val_accuracy"] = float(np.mean([sample.correct for sample in counted]))
        if config.rollout_section.num_val_generations_per_prompt > 1:
            scores["val_pass_k"] = _pass_k(counted)
        drawn = dict(enumerate(problems))
        scores |= metrics_by_origin("validate", samples, drawn, by_environment=len(config.environments) > 1)
    extra_scores = turn_metrics(config, samples)
    if any(sample.failure for sample in samples):
        extra_scores |= failure_metrics(samples)
    return {
        **scores,
        "val_mean_generation_length": float(np.mean([sample.response_length for sample in samples])),
        **{f"val_{name}": value for name, value in extra_scores.items()},
    }


def describe_validation(problems: Sequence[EncodedProblem], samples: Sequence[SampleScored]) -> list[str]:
    """Describe samples of these problems by prompt, response and reward."""
    return [f"validation: {_question(problems[s.group])!r} -> {s.response!r} (reward {s.reward:g})" for s in samples]


def _pass_k(samples: Sequence[SampleScored]) -> float:
    """Return the share of problems that any of their samples solves (pass@k for k samples of each)."""
    solved: dict[int, bool] = {}
    for sample in samples:
        solved[sample.group] = solved.get(sample.group, False) or sample.correct
    return float(np.mean([*solved.values()]))


def _question(encoded: EncodedProblem) -> str:
    """Return the question of a problem, with labels for its images."""
    question = question_text(encoded.problem.question)
    return question if encoded.images is None else shown(question)
