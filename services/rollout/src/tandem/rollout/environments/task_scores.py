"""Scores of reasoning-gym's tasks whose own scorers are wrong, as of its release 0.1.25.

`game_of_life_halting` takes any text for True. `gsm_symbolic` loses the sign of a number, and what follows a comma.
`puzzle24` takes other numbers than the puzzle's. `coin_flip` takes 0 for every probability below 0.0001. `arc_agi` and
`rearc` compare a board with tuples, which are lists once a problem has been JSON.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

Entry = Mapping[str, Any]
"""A problem as reasoning-gym has it: question, answer, metadata."""
Scorer = Callable[[str, Entry], float]

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d])")
_WHOLE = re.compile(r"\b\d+\b")
_WRONG = 0.01
"""Reward of these tasks for a wrong answer in the right form."""
_RELATIVE = 0.01
"""Largest error of a probability, as a part of it."""


def corrected_scorer(task: str, scorer: Scorer) -> Scorer:
    """Return `scorer`, a task's own, or a correct one where that is wrong. A composite's problems name their task."""
    if task == "composite":
        return lambda answer, entry: corrected_scorer(entry["metadata"]["source_dataset"], scorer)(answer, entry)
    correction = _CORRECTIONS.get(task)
    return scorer if correction is None else functools.partial(correction, scorer)


def _game_of_life_halting(scorer: Scorer, answer: str, entry: Entry) -> float:
    return float(answer.strip().rstrip(".").casefold() == str(entry["answer"]).casefold())


def _gsm_symbolic(scorer: Scorer, answer: str, entry: Entry) -> float:
    number = _NUMBER.search(answer)
    if number is None:
        return 0.0
    actual, expected = (float(text.replace(",", "")) for text in (number[0], str(entry["answer"])))
    return 1.0 if actual == expected else _WRONG


def _puzzle24(scorer: Scorer, answer: str, entry: Entry) -> float:
    numbers = sorted(map(int, _WHOLE.findall(answer)))
    return float(scorer(answer, entry)) if numbers == sorted(entry["metadata"]["numbers"]) else _WRONG


def _coin_flip(scorer: Scorer, answer: str, entry: Entry) -> float:
    score = float(scorer(answer, entry))
    if score < 1:
        return score
    actual, expected = (float(Fraction(text.replace(",", ""))) for text in (answer, str(entry["answer"])))
    return score if math.isclose(actual, expected, rel_tol=_RELATIVE) else 0.0


def _board(scorer: Scorer, answer: str, entry: Entry) -> float:
    metadata = entry["metadata"] | {"output": tuple(map(tuple, entry["metadata"]["output"]))}
    return float(scorer(answer, {**entry, "metadata": metadata}))


_CORRECTIONS: MappingProxyType[str, Callable[[Scorer, str, Entry], float]] = MappingProxyType(
    {
        "game_of_life_halting": _game_of_life_halting,
        "gsm_symbolic": _gsm_symbolic,
        "puzzle24": _puzzle24,
        "coin_flip": _coin_flip,
        "arc_agi": _board,
        "rearc": _board,
    }
)
