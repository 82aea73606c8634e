"""Find the answer in a response, and the reference answer."""

from __future__ import annotations

import re
import unicodedata

from tandem.common.errors import RewardError
from tandem.common.messages import Problem
from tandem.common.values import text_of

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]")
"""Characters without a width: soft hyphens, joiners, marks of direction and of byte order."""


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
