"""Scoring mathematics with math-verify: expressions count by value, not by spelling."""

from __future__ import annotations

import math_verify

from tandem.common.messages import Problem
from tandem.rollout.environments.environment import Score


class MathVerify:
    """One if the response's answer equals the reference, as an expression, a set, an interval and so on."""

    def score(self, problem: Problem, response: str) -> Score:
        """Parse both and compare.

        The library's own time limits use signals, which only a main thread may; `Scorer` limits the time instead.
        """
        wanted = math_verify.parse(f"${problem.answer}$", parsing_timeout=None)
        given = math_verify.parse(response, parsing_timeout=None)
        correct = bool(math_verify.verify(wanted, given, timeout_seconds=None))
        return Score(reward=float(correct), correct=correct)
