"""Score mathematics with math-verify: expressions count by value, not by spelling."""

from __future__ import annotations

import logging

import math_verify

from tandem.common.messages import Problem
from tandem.rollout.environments.answers import reference
from tandem.rollout.environments.environment import Score

# The library warns that disabling its time limits requires others; `Scorer` has them.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class MathVerify:
    """A score of one if the response's answer equals the reference, as an expression, a set, an interval and so on."""

    def score(self, problem: Problem, response: str) -> Score:
        """Parse both and compare; a response identical to the reference needs no parsing.

        The library's own time limits use signals, which cannot interrupt C code, such as a power of powers. The process
        in which this runs is killed instead.
        """
        answer = reference(problem)
        if response.strip() == answer:
            return Score(reward=1.0, correct=True, answer=answer)
        wanted = math_verify.parse(f"${answer}$", parsing_timeout=None)
        given = math_verify.parse(response, parsing_timeout=None)
        if math_verify.verify(wanted, given, timeout_seconds=None):
            return Score(reward=1.0, correct=True, answer=answer)  # one name for all equal answers
        return Score(reward=0.0, correct=False, answer=str(given[0]) if given else None)


# The first parse takes half a second. Done here, workers forked from this process need not repeat it.
MathVerify().score(Problem(problem_id="", question="", answer="\\frac{1}{2}", metadata={}), "thus $x = 0.5$")
