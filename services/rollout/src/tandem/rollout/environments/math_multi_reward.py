"""Score mathematics by several rewards: correctness, integer, format."""

from __future__ import annotations

import re

from tandem.common.messages import Problem
from tandem.rollout.environments.answers import reference
from tandem.rollout.environments.environment import Score

_FORM = re.compile(r"<think>.*?</think>\n<answer>.*</answer>", re.DOTALL)


class MathMultiReward:
    """Three rewards of 0 or 1 each, which GDPO takes apart; NeMo-RL's ``math_multi_reward``.

    The answer is the text between the last ``<answer>`` and ``</answer>``. ``correctness``: it equals the reference
    exactly. ``integer``: it consists of digits. ``format``: the response is a ``<think>`` block, which the prompt may
    have opened, and, on the next line, the only ``<answer>`` block.
    """

    runs_in = "threads"
    reads = "text"

    def score(self, problem: Problem, response: str) -> Score:
        """Compare the texts; the reward is the sum."""
        answer = response.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        correct = answer == reference(problem)
        is_whole = response.count("<answer>") == response.count("</answer>") == 1 and _FORM.fullmatch(
            response.removesuffix("\n")
        )
        components = {
            "correctness": float(correct),
            "integer": float(answer.isdigit()),
            "format": float(bool(is_whole)),
        }
        return Score(reward=sum(components.values()), correct=correct, components=components, answer=answer or None)
