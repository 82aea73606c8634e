"""Score mathematics with math-verify: expressions count by value, not by spelling.

The reference is read as NeMo-RL v0.7 reads it: ``\\boxed{reference}``, as LaTeX and nothing else. Where math-verify
calls different answers equal, `is_equal` looks again.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import math_verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
from sympy import Basic, MatrixBase, Rational, UnevaluatedExpr

from tandem.common.messages import Problem
from tandem.common.values import question_text
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

_SPACE = r"(?:[ \t\u00a0\u2000-\u200a\u202f\u205f~]|\\[ ,:;!])"
"""Pattern of a space between the parts of a mixed number, in a text or in LaTeX."""
_MIXED = re.compile(
    rf"(?<![\w.,/^\\])(\d{{1,9}})"
    rf"(?:{_SPACE}+(\d{{1,9}})/(\d{{1,9}})(?![\w/]|\.\d)"
    rf"|{_SPACE}*\\[tdc]?frac(?:\{{(\d{{1,9}})\}}\{{(\d{{1,9}})\}}|(\d)(\d))(?![\w\\({{^]))"
)
_VULGAR_FRACTION = re.compile(r"(?<![^\W\d]|[\^}\\)])[¼-¾⅐-⅞]")
_DOLLAR = re.compile(r"\\\$\s?(?=[\d.-])")
_ESCAPED_PERCENT = re.compile(r"(?<=\d)\s?\\%")
_BASE = re.compile(r"(?<=\d)_\{?(\d+)")
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
    """Return whether two answers are equal: by math-verify, and by five rules where that is too generous.

    Decimals agree in four significant digits, not only in six decimals. A point is not a set. Letters that are a word
    or a choice keep their order. ``9%`` is 0.09, and 9 only if the question asks for a percentage (`asks_percent`).
    Numbers of two bases differ; a number may lack its base.
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
    bases = [_BASE.findall(text) for text in texts]
    if {_bracket(text) for text in texts} == {"(", "{"} or (all(bases) and bases[0] != bases[1]):
        return False
    return not _is_other_word(*texts)


def _verify(expected: Parsed, actual: Parsed, decimals: int) -> bool:
    precision = _PRECISION + decimals - _DECIMALS
    return bool(math_verify.verify(expected, actual, decimals, precision, timeout_seconds=None))


def _plain(text: str) -> str:
    """Return a text with what the library does not read in forms that it reads: mixed numbers, fractions of one
    character, ``\\$18``, ``9\\%`` outside formulas, a true minus."""
    text = _ESCAPED_PERCENT.sub("%", comparable(text).replace("\u2212", "-"))
    text = _VULGAR_FRACTION.sub(_spell_fraction, text).replace("\u2044", "/")
    return _MIXED.sub(_improper, _DOLLAR.sub("", text))


def _spell_fraction(fraction: re.Match[str]) -> str:
    follows_digit = fraction.string[: fraction.start()][-1:].isdigit()
    return " " * follows_digit + unicodedata.normalize("NFKC", fraction[0])


def _improper(mixed: re.Match[str]) -> str:
    """Return a mixed number as a fraction, in the form that its own fraction has."""
    integer, numerator, denominator = (int(part) for part in mixed.groups() if part is not None)
    if numerator >= denominator:
        return mixed[0]
    numerator += integer * denominator
    return f"\\frac{{{numerator}}}{{{denominator}}}" if "frac" in mixed[0] else f"{numerator}/{denominator}"


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
    """Return whether the reference is words, or a sequence of capital letters and digits, and the answer is another."""
    plain, actual_plain = (_WRAPPER.sub(r"\1", text).strip() for text in (expected, actual))
    letters, actual_letters = ("".join(text.split()) for text in (plain, actual_plain))
    if len(letters) < 2 or not letters[0].isalpha() or not letters.isalnum() or not actual_letters.isalnum():
        return False
    is_text = plain != expected.strip() or letters.isupper()
    is_word = is_text or any(len(word) > _LONGEST_PRODUCT and word.isalpha() for word in plain.split())
    return is_word and letters.casefold() != actual_letters.casefold()


# The first parse takes half a second. Done here, workers forked from this process need not repeat it.
MathVerify().score(Problem(problem_id="", question="", answer="\\frac{1}{2}", metadata={}), "thus $x = 0.5$")
