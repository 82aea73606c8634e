"""Any of several right answers: a built-in environment that compares with one is asked about each.

`tandem.config.checks.data.COMPARING_ENVIRONMENTS` names these environments. Others read the answer as it stood in the
row.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.common.messages import Problem
from tandem.common.values import answer_texts
from tandem.rollout.environments.environment import ConversingEnvironment, Environment, Score, Turn
from tandem.samples.chat_templates import Messages


class AnyAnswer:
    """An environment whose score is the best of those for each of the right answers, which it sees as texts."""

    def __init__(self, environment: Environment, *, reads_boxes: bool) -> None:
        self._environment = environment
        self.reads = getattr(environment, "reads", "answer")
        self._reads_boxes = reads_boxes

    def score(self, problem: Problem, response: str) -> Score:
        """Score the response against each right answer until one makes it correct."""
        best = _best(problem, self._reads_boxes, lambda variant: self._environment.score(variant, response))
        assert isinstance(best, Score), "an environment that scores has no turns"
        return best


class AnyAnswerInTurns:
    """A multi-turn environment whose last score is the best of those for each of the right answers."""

    def __init__(self, environment: ConversingEnvironment) -> None:
        self._environment = environment

    def step(self, problem: Problem, conversation: Messages) -> Score | Turn:
        """Answer the last response, or score it against each right answer until one makes it correct."""
        return _best(problem, False, lambda variant: self._environment.step(variant, conversation))


def _best(problem: Problem, reads_boxes: bool, call: Callable[[Problem], Score | Turn]) -> Score | Turn:
    best: Score | None = None
    # Without any, the environment says that there is no answer.
    for text in answer_texts(problem.answer, boxes=reads_boxes) or ("",):
        result = call(msgspec.structs.replace(problem, answer=text))
        if isinstance(result, Turn) or result.correct:
            return result
        if best is None or result.reward > best.reward:
            best = result
    assert best is not None, "there is at least one text"
    return best
