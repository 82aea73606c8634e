"""Answers: found in a response; compared exactly, after ``Answer:``, or scored by several rewards."""

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
_TAIL = 300
"""Characters at the end of a response that are searched for an answer."""
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_CHOICE = re.compile(r"answer\s*:[\s*$(]*([A-Z])(?![A-Za-z])", re.IGNORECASE)
_ONLY_CHOICE = re.compile(r"[\s*$(]*([A-Z])[\s*$).}]*", re.IGNORECASE)
_WORDS = (
    *("answer", "antwort", "respuesta", "risposta", "réponse", "resposta"),
    *("jawaban", "jibu", "idahun", "ìdáhùn", "idáhùn", "àmọ̀nà", "àdáhùn", "ànúgọ", "àṣàyàn", "উত্তর", "उत्तर", "답변"),
    *(
        "정답",
        "답",
        "答案",
        "答",
        "答复",
        "答曰",
        "答え",
        "回答",
        "解答",
        "الإجابة",
        "الجواب",
        "إجابة",
        "الإجابة النهائية",
    ),
    *("الإجابة الصحيحة", "الإجابة الصحيحة هي", "الإجابة هي", "الجواب النهائي"),
)
"""Words that announce an answer in the languages of MMLU's translations."""
_LETTERS = {letter: letter for letter in "ABCDEFGHIJ"}


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


_LETTERS |= dict(zip("ＡＢＣＤＥＦＧＨＩＪ", "ABCDEFGHIJ", strict=True))
_LETTERS |= dict(zip("أبجد", "ABCD", strict=True)) | dict(zip("অবডঢ", "ABCD", strict=True))
"""Letters of choices there: in Japanese, Arabic and Bengali."""
_ANNOUNCED = rf"(?:best answer is|(?:{'|'.join(map(comparable, _WORDS))})\s*[:：ঃ])"
_CHOICE_ANYWHERE = re.compile(
    rf"{_ANNOUNCED}[\s*$(（]*([{''.join(_LETTERS)}])(?![^\W\d_])",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"\\(?:boxed|textbf|text|mathrm|mathbf)|\\?\{|\\\(|\}?\$|\\\$|\*\*")

# The normalisation of Lewkowycz et al. 2022 (Minerva, arXiv:2206.14858), appendix D.1, as DAPO's verifier has it.
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
"""Texts and their replacements, in the order in which they are replaced."""
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
"""Texts that are removed, in this order: words and signs beside a value."""
_MATHEMATICS = re.compile(r".*?\$(.*?)\$.*")
_WRAPPED = (
    *(re.compile(rf"\\{command}\{{(.*?)\}}") for command in ("text", "textbf", "overline")),
    re.compile(r"\\boxed\{(.*)\}"),
)
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


class AnswerLine:
    """A score of one if the text after the last ``Answer:`` equals the reference (the rule-based verifier of DAPO).

    Yu et al. 2025, arXiv:2503.14476, section 4.1; its data ask for such a line and for integers. Both texts are
    `normalised`. Rewards are those of NeMo-RL's ``dapo_math_verify``.
    """

    def score(self, problem: Problem, response: str) -> Score:
        """Compare the texts; a response without such a line is wrong."""
        matches = _ANSWER.findall(response[-_TAIL:])
        answer = normalised(comparable(matches[-1])) if matches else None
        correct = answer == normalised(comparable(reference(problem)))
        return Score(reward=float(correct), correct=correct, answer=answer)


class ChoiceLine:
    """A score of one if the letter after the last ``Answer:`` is the reference, for questions with choices."""

    def score(self, problem: Problem, response: str) -> Score:
        """Compare the letters; a response without such a line is wrong."""
        matches = _CHOICE.findall(_MARKUP.sub("", comparable(response)))
        answer = matches[-1].upper() if matches else None
        correct = answer == _choice(reference(problem))
        return Score(reward=float(correct), correct=correct, answer=answer)


class ChoiceLineOfAnyLanguage:
    """The same, with ``Answer:`` and the letters in any language of MMLU's translations."""

    def score(self, problem: Problem, response: str) -> Score:
        """Compare the letters; a response without such a line is wrong."""
        matches = _CHOICE_ANYWHERE.findall(_MARKUP.sub("", comparable(response)))
        answer = _LETTERS[matches[-1].upper()] if matches else None
        correct = answer == _choice(reference(problem))
        return Score(reward=float(correct), correct=correct, answer=answer)


def _choice(answer: str) -> str:
    """Return the letter of a reference answer, which may stand in brackets, a box or a text of LaTeX."""
    text = _MARKUP.sub("", comparable(answer))
    only = _ONLY_CHOICE.fullmatch(text)
    letter = (only[1] if only else text).upper()
    return _LETTERS.get(letter, letter)


def normalised(answer: str) -> str:
    """Return an answer in the form in which it is compared: what follows the last ``=``, without units, wrappers and
    spaces, with whole fractions and roots; a whole number without commas."""
    text = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    text = _MATHEMATICS.sub(r"$\1$", text)
    for wrapped in _WRAPPED:
        text = wrapped.sub(r"\1", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
