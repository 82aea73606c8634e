"""Score mathematics with math-verify: expressions count by value, not by spelling.

The reference is read as NeMo-RL v0.7 reads it: ``\\boxed{reference}``, as LaTeX and nothing else. Where math-verify
calls different answers equal, `is_equal` looks again.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import math_verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
from sympy import Basic, MatrixBase, Rational, UnevaluatedExpr

from tandem.common.messages import Problem
from tandem.common.values.texts import question_text
from tandem.rollout.environments.answers import comparable, reference
from tandem.rollout.environments.environment import Score

# The library warns that disabling its time limits requires others; `EnvironmentScorer` has them.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_OF_REFERENCES = (LatexExtractionConfig(),)
_OF_RESPONSES = (ExprExtractionConfig(), LatexExtractionConfig())
_DECIMALS = 6
"""Decimals that math-verify compares."""
_SIGNIFICANT = 4
"""Significant digits in which decimals must agree, too: of small numbers six decimals have none."""
_PRECISION = 15
"""Digits below which math-verify takes a difference for zero."""
_MOST_DECIMALS = 1000
_HUNDREDTH = UnevaluatedExpr(Rational(1, 100))
"""Factor by which math-verify marks percentages."""

_MIXED = re.compile(r"(?<![\w.,/^\\])(\d{1,9})[ \u00a0](\d{1,9})/(\d{1,9})(?![\w/]|\.\d)")
_DOLLAR = re.compile(r"\\\$\s?(?=[\d.-])")
_PERCENT = re.compile(
    r"%|per ?cent|prozent|pourcent|por ?cento|por ciento|процент|百分|パーセント|퍼센트", re.IGNORECASE
)
_BEFORE_VALUE = re.compile(r".*(?:=|\\in\b)", re.DOTALL)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_LONGEST_PRODUCT = 3
"""Most lower-case letters that are a product of variables rather than a word."""

Parsed = list[Any]
"""A parsed expression, if parsing succeeded, and the text that was parsed; empty if there was none."""


class MathVerify:
    """A score of one if the response's answer equals the reference, as an expression, a set, an interval and so on."""

    def score(self, problem: Problem, response: str) -> Score:
        """Parse both and compare; a response identical to a reference of one line needs no parsing.

        The library's own time limits use signals, which cannot interrupt C code, such as a power of powers. The process
        in which this runs is killed instead.
        """
        answer = reference(problem)
        if "\n" not in answer and comparable(response) == comparable(answer):
            return Score(reward=1.0, correct=True, answer=answer)
        expected, parsed = parse_reference(answer), parse_response(response)
        if is_equal(expected, parsed, asks_percent=_PERCENT.search(question_text(problem.question)) is not None):
            return Score(reward=1.0, correct=True, answer=answer)  # one name for all equal answers
        return Score(reward=0.0, correct=False, answer=str(parsed[0]) if parsed else None)


def parse_reference(answer: str) -> Parsed:
    """Parse a reference answer, as the content of a box."""
    parsed: Parsed = math_verify.parse(f"\\boxed{{{_plain(answer)}}}", _OF_REFERENCES, parsing_timeout=None)
    return parsed


def parse_response(response: str) -> Parsed:
    """Find and parse the answer in a response: what is in a box, what is called the answer, or the last expression."""
    parsed: Parsed = math_verify.parse(_plain(response), _OF_RESPONSES, parsing_timeout=None)
    return parsed


def is_equal(expected: Parsed, actual: Parsed, *, asks_percent: bool = False) -> bool:
    """Return whether two answers are equal: by math-verify, and by four rules where that is too generous.

    Decimals agree in four significant digits, not only in six decimals. A point is not a set. Letters that are a word
    or a choice keep their order. ``9%`` is 0.09, and 9 only if the question asks for a percentage (`asks_percent`).
    """
    if not _verify(expected, actual, _DECIMALS):
        return False
    if _percentages(expected) != _percentages(actual) and not asks_percent:
        expected, actual = _convert_percentages(expected), _convert_percentages(actual)
        if not _verify(expected, actual, _DECIMALS):
            return False
    decimals = _decimals([*expected, *actual])
    if decimals > _DECIMALS and not _verify(expected, actual, decimals):
        return False
    texts = _text(expected), _text(actual)
    return {_bracket(text) for text in texts} != {"(", "{"} and not _is_other_word(*texts)


def _verify(expected: Parsed, actual: Parsed, decimals: int) -> bool:
    precision = _PRECISION + decimals - _DECIMALS
    return bool(math_verify.verify(expected, actual, decimals, precision, timeout_seconds=None))


def _plain(text: str) -> str:
    """Return a text with what the library does not read in forms that it reads: mixed numbers, ``\\$18``, a true
    minus."""
    return _MIXED.sub(_improper, _DOLLAR.sub("", comparable(text).replace("\u2212", "-")))


def _improper(mixed: re.Match[str]) -> str:
    integer, numerator, denominator = map(int, mixed.groups())
    return f"{integer * denominator + numerator}/{denominator}" if numerator < denominator else mixed[0]


def _text(parsed: Parsed) -> str:
    return parsed[-1] if parsed and isinstance(parsed[-1], str) else ""


def _percentages(parsed: Parsed) -> bool:
    return any(isinstance(part, Basic) and part.has(_HUNDREDTH) for part in parsed)


def _convert_percentages(parsed: Parsed) -> Parsed:
    """Return percentages as hundredths, without the text, which lacks their sign."""
    return [part.xreplace({_HUNDREDTH: _HUNDREDTH.args[0]}) for part in parsed if isinstance(part, Basic)]


def _decimals(parts: Parsed) -> int:
    """Return the decimals that the smallest number needs, so that it has enough significant digits."""
    exponents = itertools.chain.from_iterable(map(_exponents, parts))
    return min(_SIGNIFICANT + math.ceil(-min(exponents, default=0) * math.log10(2)), _MOST_DECIMALS)


def _exponents(part: object) -> Iterator[int]:
    """Yield the binary exponents of the numbers in an expression, without zeros."""
    if isinstance(part, MatrixBase):
        children = part.flat()
    elif not isinstance(part, Basic):
        return
    elif part.is_number:
        for number in part.evalf(5).as_real_imag():
            if number.is_Float and number:
                _, _, exponent, num_bits = number._mpf_
                yield exponent + num_bits
        return
    else:
        children = part.args
    for child in children:
        yield from _exponents(child)


def _bracket(text: str) -> str:
    """Return the bracket around the whole value, ``(`` or ``{``; empty if it has others, or none."""
    value = _BEFORE_VALUE.sub("", text.replace("\\left", "").replace("\\right", "")).strip()
    if value.startswith("(") and value.endswith(")"):
        return "("
    return "{" if value.startswith("\\{") and value.endswith("\\}") else ""


def _is_other_word(expected: str, actual: str) -> bool:
    """Return whether the reference is a word, or a sequence of capital letters, and the answer is another."""
    letters, actual_letters = (_WRAPPER.sub(r"\1", text).strip() for text in (expected, actual))
    if len(letters) < 2 or not letters.isalpha() or not actual_letters.isalpha():
        return False
    is_word = letters != expected.strip() or letters.isupper() or len(letters) > _LONGEST_PRODUCT
    return is_word and letters.casefold() != actual_letters.casefold()


# The first parse takes half a second. Done here, workers forked from this process need not repeat it.
MathVerify().score(Problem(problem_id="", question="", answer="\\frac{1}{2}", metadata={}), "thus $x = 0.5$")
