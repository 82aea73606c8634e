"""Answers: found in a response, compared exactly with the reference, or scored by several rewards."""

from __future__ import annotations

import re
import unicodedata

from tandem.common.errors import RewardError
from tandem.common.messages import Problem
from tandem.common.values import text_of
from tandem.rollout.environments.environment import Score

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]")
"""Characters without a width: soft hyphens, joiners, marks of direction and of byte order."""
_FORM = re.compile(r"<think>.*?</think>\n<answer>.*</answer>", re.DOTALL)


def comparable(text: str) -> str:
    """Return a text as it is compared: composed (NFC), without characters of no width or white space at its ends."""
    return unicodedata.normalize("NFC", _INVISIBLE.sub("", text)).strip()


def answer_in(response: str, answer_after: str | None) -> str:
    """Return what follows the last `answer_after`, stripped; the whole response if it is None or does not occur."""
    if answer_after is None:
        return response.strip()
    return response.rpartition(answer_after)[2].strip()


def reference(problem: Problem) -> str:
    """Return the reference answer, stripped. Raises `RewardError` if there is none: no response could be right."""
    answer = text_of(problem.answer).strip()
    if not answer:
        raise RewardError(f"problem {problem.problem_id!r} has no reference answer to compare with")
    return answer


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
