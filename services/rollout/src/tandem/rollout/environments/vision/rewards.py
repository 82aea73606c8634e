"""Functions that score a response against a reference: NeMo-RL's, by its names and with its values.

Each takes the reference and the response, and returns a value and whether the response is correct, or None if it does
not judge that. The answer is what stands between the first opening and the last closing tag.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import MappingProxyType

Judged = tuple[float, bool | None]
_Box = tuple[float, float, float, float]
_Choose = Callable[[tuple[float, float]], float]

_LEAST_AREA = 1e-3
"""Areas are at least this, so that no box is divided by nothing."""
_CORRECT_FROM = 0.5
_BOX = "\\boxed{"


def tagged(response: str, tag: str) -> str | None:
    """Return what is between a tag's first opening and last closing; None without both."""
    match = re.search(rf"<{tag}>(.*)</{tag}>", response, re.DOTALL)
    return None if match is None else match[1]


def has_format(reference: str, response: str, *, think_tag: str = "think", answer_tag: str = "answer") -> Judged:
    """Return 0.25 for a reasoning in tags, and 0.75 for an answer in tags."""
    thinks, answers = (tagged(response, tag) is not None for tag in (think_tag, answer_tag))
    return 0.25 * thinks + 0.75 * answers, None


def exact_alnum(reference: str, response: str, *, answer_tag: str = "answer") -> Judged:
    """Return 1 if the answer has the letters and digits of the reference, whatever their case."""
    answer = tagged(response, answer_tag)
    correct = answer is not None and _alphanumeric(answer) == _alphanumeric(reference)
    return float(correct), correct


def math_expr(reference: str, response: str, *, tag: str = "answer") -> Judged:
    """Return 1 if the answer equals the reference as an expression, by math-verify.

    The library's own time limits use signals; the process in which this runs is killed instead.
    """
    from tandem.rollout.environments.math import is_equal, parse_reference, parse_response

    answer = tagged(response, tag)
    if answer is None:
        return 0.0, False
    boxed = answer if answer.startswith(_BOX) else f"{_BOX}{answer}}}"
    correct = is_equal(parse_reference(_unboxed(reference)), parse_response(boxed))
    return float(correct), correct


def bbox_giou(reference: str, response: str, *, giou_penalty_thres: float = 10.0, answer_tag: str = "answer") -> Judged:
    """Return the intersection over union of two boxes ``[x1, y1, x2, y2]``.

    Where it is below `giou_penalty_thres`, return the generalised one (GIoU, Rezatofighi et al. 2019,
    arXiv:1902.09630), which also tells how far apart the boxes are: from -1 to 1.
    """
    answer = tagged(response, answer_tag)
    expected, actual = _box(reference), None if answer is None else _box(answer)
    if expected is None or actual is None:
        return 0.0, False
    common = _area(_between(max, min, expected, actual))
    union = max(_LEAST_AREA, _area(expected) + _area(actual) - common)
    overlap = common / union
    if overlap < giou_penalty_thres:
        hull = max(_LEAST_AREA, _area(_between(min, max, expected, actual)))
        overlap -= (hull - union) / hull
    return overlap, overlap > _CORRECT_FROM


def _between(first: _Choose, last: _Choose, box_a: _Box, box_b: _Box) -> _Box:
    """Return the box with the chosen ones of two boxes' first corners, and of their last ones."""
    x1, y1, x2, y2 = zip(box_a, box_b, strict=True)
    return first(x1), first(y1), last(x2), last(y2)


def _area(box: _Box) -> float:
    x1, y1, x2, y2 = box
    return max(0.0, x2 - x1) * max(0.0, y2 - y1)


def _box(text: str) -> _Box | None:
    """Return four numbers with commas between them, in brackets or not; None for anything else.

    A box whose right is left of its left, or whose bottom is above its top, is none: its area would count as positive
    outside of any hull, and be worth any reward.
    """
    try:
        numbers = [float(number) for number in re.sub(r"[\[\]]", "", text).split(",")]
    except ValueError:
        return None
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        return None
    x1, y1, x2, y2 = numbers
    return (x1, y1, x2, y2) if x1 <= x2 and y1 <= y2 else None


def _alphanumeric(text: str) -> str:
    return "".join(character for character in text if character.isalnum()).lower()


def _unboxed(text: str) -> str:
    """Return the content of a box that a text begins with and ends with, or else the text."""
    return text[len(_BOX) : -1] if text.startswith(_BOX) and text.endswith("}") else text


FUNCTIONS: MappingProxyType[str, Callable[..., Judged]] = MappingProxyType(
    {"format": has_format, "exact_alnum": exact_alnum, "math_expr": math_expr, "bbox_giou": bbox_giou}
)
"""Functions by NeMo-RL's names."""
