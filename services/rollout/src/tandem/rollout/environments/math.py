"""Score mathematics with math-verify: expressions count by value, not by spelling."""

from __future__ import annotations

import logging

import math_verify

from tandem.common.messages import Problem
from tandem.rollout.environments.answers import reference
from tandem.rollout.environments.environment import Score

# It warns that whoever switches its own time limits off must have others, as `Scorer` has.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class MathVerify:
    """One if the response's answer equals the reference, as an expression, a set, an interval and so on."""

    def score(self, problem: Problem, response: str) -> Score:
        """Parse both and compare; a response that is the reference, letter for letter, needs no parsing.

        The library's own time limits use signals, which do not end what computes in C, such as a power of powers; the
        process in which this runs is killed instead.
        """
        answer = reference(problem)
        correct = response.strip() == answer or _equal(answer, response)
        return Score(reward=float(correct), correct=correct)


def _equal(answer: str, response: str) -> bool:
    wanted = math_verify.parse(f"${answer}$", parsing_timeout=None)
    given = math_verify.parse(response, parsing_timeout=None)
    return bool(math_verify.verify(wanted, given, timeout_seconds=None))


# The first time takes half a second; done here, no worker that is forked from who imported this has it before it.
_equal("\\frac{1}{2}", "thus $x = 0.5$")
