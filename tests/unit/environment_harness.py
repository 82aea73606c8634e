"""Environments' configurations, problems and conversations."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tandem.common.messages import Problem
from tandem.config import Config, build_config
from tandem.rollout.environments import Score, Turn
from tandem.rollout.environments.outcomes import UnscoredResponse
from tandem.rollout.environments.scorer import EnvironmentScorer

WAIT_S = 120.0
Result = Score | Turn | UnscoredResponse


def config(environment: str, settings: dict[str, Any] | None = None, task: str | None = None) -> Config:
    source: dict[str, Any] = {"dataset_name": "jsonl", "train_data_path": "train.jsonl"}
    if task is not None:
        source = {"dataset_name": "reasoning_gym", "task": task}
    return build_config(
        {"grpo": {}, "policy": {"model_name": "model"}, "data": source, "env": {environment: settings or {}}}
    )


def said(*texts: str) -> list[dict[str, str]]:
    """Return a conversation after its prompt: the policy begins, and the environment answers in turn."""
    return [{"role": ("assistant", "user")[index % 2], "content": text} for index, text in enumerate(texts)]


def problem(answer: str = "7", name: str = "p1") -> Problem:
    return Problem(problem_id=name, question="3 + 4", answer=answer, metadata={})


def worth(scored: Score | Turn) -> Score | Turn:
    """Return a score without the answer that was found, which tests of evaluation look at."""
    return msgspec.structs.replace(scored, answer=None) if isinstance(scored, Score) else scored


def results(scorer: EnvironmentScorer, *responses: str, of: Problem | None = None) -> list[Result]:
    """Return what becomes of responses to one problem, in their order."""
    for key, response in enumerate(responses):
        scorer.submit(key, of or problem(), said(response))
    found: dict[int, Result] = {}
    deadline = time.monotonic() + WAIT_S
    while len(found) < len(responses):
        assert time.monotonic() < deadline, found
        found |= scorer.poll()
        time.sleep(0.001)
    return [found[key] for key in range(len(responses))]
