"""Score responses by equality with the reference answer."""

from __future__ import annotations

from tandem.common.messages import Problem
from tandem.rollout.environments.answers import answer_in, comparable, reference
from tandem.rollout.environments.environment import Score


class ExactMatch:
    """A score of one for the reference answer, zero for anything else.

    Both are composed (NFC); characters without a width, and white space at both ends, are ignored.
    """

    runs_in = "threads"

    def __init__(self, *, answer_after: str | None = None, ignore_case: bool = False) -> None:
        """Look for the answer after the last occurrence of `answer_after` in the response."""
        self._answer_after = answer_after
        self._ignore_case = ignore_case

    def score(self, problem: Problem, response: str) -> Score:
        """Compare the answer with the reference."""
        answer, expected = map(comparable, (answer_in(response, self._answer_after), reference(problem)))
        if self._ignore_case:
            answer, expected = answer.casefold(), expected.casefold()
        return Score(reward=float(answer == expected), correct=answer == expected, answer=answer or None)
