"""Finding the answer in a response."""

from __future__ import annotations


def answer_in(response: str, answer_after: str | None) -> str:
    """Return what follows the last `answer_after`, stripped; the whole response if it is None or does not occur."""
    if answer_after is None:
        return response.strip()
    return response.rpartition(answer_after)[2].strip()
