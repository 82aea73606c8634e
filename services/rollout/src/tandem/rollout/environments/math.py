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
        if response.strip() == answer:
            return Score(reward=1.0, correct=True, answer=answer)
        wanted = math_verify.parse(f"${answer}$", parsing_timeout=None)
        given = math_verify.parse(response, parsing_timeout=None)
        if math_verify.verify(wanted, given, timeout_seconds=None):
            return Score(reward=1.0, correct=True, answer=answer)  # all that are equal to it have one name
        return Score(reward=0.0, correct=False, answer=str(given[0]) if given else None)


# The first time takes half a second; done here, no worker that is forked from who imported this has it before it.
MathVerify().score(Problem(problem_id="", question="", answer="\\frac{1}{2}", metadata={}), "thus $x = 0.5$")
