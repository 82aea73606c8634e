"""Score reasoning-gym problems with the scorer of their own task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.common.messages import Problem
from tandem.rollout.environments.answers import answer_in
from tandem.rollout.environments.environment import Score
from tandem.rollout.environments.task_scores import corrected_scorer
from tandem.samples.data_sets.reasoning_tasks import task_dataset

_SOLVED = 1 - 1e-6
"""Score from which a response counts as solved; scorers give partial credit, for nearly right answers 0.99."""


class ReasoningGym:
    """An environment with reasoning-gym's own reward, but for the tasks of `task_scores`."""

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
        self._scorer = task_dataset(task, parameters, size=1, seed=0).score_answer
        self._corrected = corrected_scorer(task, self._scorer)
        self._answer_after = answer_after
        self._partial_credit = partial_credit

    def score(self, problem: Problem, response: str) -> Score:
        """Ask the task's scorer. A response that makes it raise is worth zero, unless the reference answer does so
        too."""
        answer = answer_in(response, self._answer_after)
        entry = {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata}
        try:
            score = float(self._corrected(answer, entry))
        except Exception:
            # Some scorers parse without a guard. If this raises too, the scorer or the problem is at fault.
            self._scorer(problem.answer, entry)
            score = 0.0
        correct = score >= _SOLVED
        reward = score if correct or self._partial_credit else 0.0
        return Score(reward=reward, correct=correct, answer=answer or None)
