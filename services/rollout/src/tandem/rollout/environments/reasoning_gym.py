"""Score reasoning-gym problems with the scorer of their own task, corrected where it is wrong.

As of its release 0.1.25, `game_of_life_halting` takes any text for True. `gsm_symbolic` loses the sign of a number, and
what follows a comma. `puzzle24` takes other numbers than the puzzle's. `coin_flip` takes 0 for every probability below
0.0001. `arc_agi` and `rearc` compare a board with tuples, which are lists once a problem has been JSON.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from tandem.common.messages import Problem
from tandem.rollout.environments.answers import answer_in
from tandem.rollout.environments.environment import Score
from tandem.samples.data_sets.reasoning_tasks import LEVEL, task_at_level, task_dataset

Entry = Mapping[str, Any]
"""A problem as reasoning-gym has it: question, answer, metadata."""
Scorer = Callable[[str, Entry], float]

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d])")
_WHOLE = re.compile(r"\b\d+\b")
_WRONG = 0.01
"""Reward of these tasks for a wrong answer in the right form."""
_RELATIVE = 0.01
"""Largest error of a probability, as a part of it."""


_SOLVED = 1 - 1e-6
"""Score from which a response counts as solved; scorers give partial credit, for nearly right answers 0.99."""


class ReasoningGym:
    """An environment with reasoning-gym's own reward, but for the tasks of `_CORRECTIONS`."""

    def __init__(
        self,
        task: str,
        parameters: Mapping[str, Any],
        *,
        answer_after: str | None = None,
        partial_credit: bool = True,
    ) -> None:
        """Make the task's scorer.

        Args:
            task: name of the reasoning-gym task.
            parameters: parameters of the task, which scorers read as well.
            answer_after: the answer is what follows the last occurrence of this text in the response.
            partial_credit: whether a score below solved counts, or is zero.

        """
        self._scorers = functools.cache(functools.partial(_make_scorers, task, parameters))
        self._scorers()
        self._answer_after = answer_after
        self._partial_credit = partial_credit

    def score(self, problem: Problem, response: str) -> Score:
        """Ask the task's scorer. A response that makes it raise is worth zero, unless the reference answer does so
        too."""
        answer = answer_in(response, self._answer_after)
        entry = {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata}
        level = problem.metadata.get(LEVEL)
        scorer, corrected = (
            self._scorers() if level is None else self._scorers(problem.metadata["source_dataset"], level)
        )
        try:
            score = float(corrected(answer, entry))
        except Exception:
            # Some scorers parse without a guard. If this raises too, the scorer or the problem is at fault.
            scorer(problem.answer, entry)
            score = 0.0
        correct = score >= _SOLVED
        reward = score if correct or self._partial_credit else 0.0
        return Score(reward=reward, correct=correct, answer=answer or None)


def _make_scorers(
    task: str, parameters: Mapping[str, Any], part: str = "", level: int | None = None
) -> tuple[Scorer, Scorer]:
    """Return a task's own scorer and the corrected one; of a part of a composite at another level, if one is named."""
    if level is not None:
        parameters = task_at_level(parameters, part, level)
    scorer = task_dataset(task, parameters, size=1, seed=0).score_answer
    return scorer, _corrected_scorer(task, scorer)


def _corrected_scorer(task: str, scorer: Scorer) -> Scorer:
    """Return `scorer`, a task's own, or a correct one where that is wrong. A composite's problems name their task."""
    if task == "composite":
        return lambda answer, entry: _corrected_scorer(entry["metadata"]["source_dataset"], scorer)(answer, entry)
    correction = _CORRECTIONS.get(task)
    return scorer if correction is None else functools.partial(correction, scorer)


def _game_of_life_halting(scorer: Scorer, answer: str, entry: Entry) -> float:
    return float(answer.strip().rstrip(".").casefold() == str(entry["answer"]).casefold())


def _gsm_symbolic(scorer: Scorer, answer: str, entry: Entry) -> float:
    number = _NUMBER.search(answer)
    if number is None:
        return 0.0
    actual, expected = (float(text.replace(",", "")) for text in (number[0], str(entry["answer"])))
    return 1.0 if actual == expected else _WRONG


def _puzzle24(scorer: Scorer, answer: str, entry: Entry) -> float:
    numbers = sorted(map(int, _WHOLE.findall(answer)))
    return float(scorer(answer, entry)) if numbers == sorted(entry["metadata"]["numbers"]) else _WRONG


def _coin_flip(scorer: Scorer, answer: str, entry: Entry) -> float:
    score = float(scorer(answer, entry))
    if score < 1:
        return score
    actual, expected = (float(Fraction(text.replace(",", ""))) for text in (answer, str(entry["answer"])))
    return score if math.isclose(actual, expected, rel_tol=_RELATIVE) else 0.0


def _board(scorer: Scorer, answer: str, entry: Entry) -> float:
    metadata = entry["metadata"] | {"output": tuple(map(tuple, entry["metadata"]["output"]))}
    return float(scorer(answer, {**entry, "metadata": metadata}))


_CORRECTIONS: MappingProxyType[str, Callable[[Scorer, str, Entry], float]] = MappingProxyType(
    {
        "game_of_life_halting": _game_of_life_halting,
        "gsm_symbolic": _gsm_symbolic,
        "puzzle24": _puzzle24,
        "coin_flip": _coin_flip,
        "arc_agi": _board,
        "rearc": _board,
    }
)
