"""The rewards of reference answers: a right answer that is worth less than the best is said."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.common.messages import PromptGroup
from tandem.common.texts import shorten
from tandem.config import Config, config_to_json
from tandem.config.checks.data import PYTHON_REWARDS
from tandem.launch.preparing.custom_code import ModuleProcess
from tandem.samples.reference_scores import MODULE, ReferenceAnswer, ReferenceScore, ScoringOrder, encode_order

_BEST = 1.0


class ReferenceRewards(NamedTuple):
    """The rewards of reference answers, as lines."""

    lines: tuple[str, ...]
    """A line for each answer that has a reward, and one for each environment that gives none."""
    notices: tuple[str, ...]
    """A line for each answer that is worth less than the best."""
    problems: tuple[str, ...] = ()
    """A line for each environment that cannot be made, without which the run ends as soon as it has begun."""


def reference_rewards(config: Config, groups: Sequence[PromptGroup]) -> ReferenceRewards:
    """Score the reference answers of prompts, in another process; empty where nothing scores responses."""
    lines, notices, problems = [], [], []
    answers = [
        ReferenceAnswer(problem=group.problem, environment=group.environment or config.environments[0])
        for group in groups
        if config.environments
    ]
    names = dict.fromkeys(answer.environment for answer in answers)
    unscored = {name: reason for name in names if (reason := _explain_unscored(config, name))}
    lines += [f"env.{name}: {reason}" for name, reason in unscored.items()]
    answers = [answer for answer in answers if answer.environment not in unscored]
    for answer, score in zip(answers, _scores(config, answers) if answers else (), strict=True):
        row, key = answer.problem.problem_id, f"env.{answer.environment}"
        if not score.is_environment_made:
            problems.append(score.failure)
            continue
        if score.failure:
            lines.append(f"{row}: no reward in {key}: {score.failure}")
            continue
        verdict = "correct" if score.correct else "not correct"
        text = repr(shorten(score.response))
        written = f"written as {text}" if score.correct else f"written as {text}, in a box and after 'Answer:'"
        written += f" ({score.part})" if score.part else ""
        lines.append(f"{row}: {score.reward:g} ({verdict}) in {key}, {written}")
        if score.reward < _BEST or not score.correct:
            but = "" if score.correct else ", not correct"
            notices.append(f"the reference answer of {row} scores {score.reward:g}{but} in {key}, {written}")
    return ReferenceRewards(tuple(dict.fromkeys(lines)), tuple(notices), tuple(dict.fromkeys(problems)))


def _explain_unscored(config: Config, name: str) -> str:
    """Return why an environment scores nothing before the run; empty if it does."""
    settings = config.env.get(name)
    if settings is None:
        return ""  # a built-in one without settings
    if settings.is_agent:
        return "its agent scores the samples of a run"
    if settings.judge is not None:
        return "a judge needs its model, so it scores nothing here"
    if settings.is_reward_model:
        return "a reward model compares responses, so it scores no reference answer"
    return "functions of a Python program score there" if name == PYTHON_REWARDS else ""


def _scores(config: Config, answers: Sequence[ReferenceAnswer]) -> list[ReferenceScore]:
    """Return the scores of another process; of what it does not get to, the reason."""
    deadline_s = config.cluster.deadlines.join_s
    order = encode_order(ScoringOrder(config=config_to_json(config), answers=tuple(answers)))
    with tempfile.TemporaryDirectory() as folder:
        with ModuleProcess(MODULE, order, Path(folder)) as process:
            try:
                process.wait(deadline_s)
                reason = f"it {process.ending}"
            except subprocess.TimeoutExpired:
                reason = f"that takes over {deadline_s:g} s (cluster.deadlines.join_s)"
        written = process.answer.read_bytes() if process.answer.exists() else b""
    lines = written[: written.rfind(b"\n") + 1].splitlines()
    scores = [msgspec.json.decode(line, type=ReferenceScore) for line in lines]
    return [*scores, *[ReferenceScore(failure=reason)] * (len(answers) - len(scores))]
