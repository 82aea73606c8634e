"""Score the text after ``Answer:`` in a response: mathematics as text, or the letter of a choice."""

from __future__ import annotations

import re

from tandem.common.messages import Problem
from tandem.rollout.environments.answers import reference
from tandem.rollout.environments.environment import Score

_TAIL = 300
"""Characters at the end of a response that are searched for an answer."""
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_CHOICE = re.compile(r"answer\s*:[\s*$(]*([A-Z])(?![A-Za-z])", re.IGNORECASE)
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
    *("الإجابة الصحيحة", "الإجابة الصحيحة هي", "الإجابة هي"),
)
"""Words that announce an answer in the languages of MMLU's translations."""
_LETTERS = {letter: letter for letter in "ABCDEFGHIJ"}
_LETTERS |= dict(zip("ＡＢＣＤＥＦＧＨＩＪ", "ABCDEFGHIJ", strict=True))
_LETTERS |= dict(zip("أبجد", "ABCD", strict=True)) | dict(zip("অবডঢ", "ABCD", strict=True))
"""Letters of choices there: in Japanese, Arabic and Bengali."""
_CHOICE_ANYWHERE = re.compile(
    rf"(?:best answer is|(?:{'|'.join(_WORDS)})\s*[:：ঃ])[\s*$(（]*([{''.join(_LETTERS)}])(?![^\W\d_])", re.IGNORECASE
)
_MARKUP = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)?[({]|\*\*")
_WRAPPED = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mbox|overline)\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]frac")
_NOISE = re.compile(r"\\[!,;:]|\\(?:left|right)|[\s$]")
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


class AnswerLine:
    """A score of one if the text after the last ``Answer:`` equals the reference (the rule-based verifier of DAPO).

    Yu et al. 2025, arXiv:2503.14476, section 4.1; its data ask for such a line and for integers. Both texts are
    compared without the spaces, dollars and boxes of LaTeX, the dot at the end of a sentence, and the commas between
    thousands.
    """

    def score(self, problem: Problem, response: str) -> Score:
        """Compare the texts; a response without such a line is wrong."""
        found = _ANSWER.findall(response[-_TAIL:])
        given = normalised(found[-1]) if found else None
        correct = given == normalised(reference(problem))
        return Score(reward=float(correct), correct=correct, answer=given)


class ChoiceLine:
    """A score of one if the letter after the last ``Answer:`` is the reference, for questions with choices."""

    def score(self, problem: Problem, response: str) -> Score:
        """Compare the letters; a response without such a line is wrong."""
        found = _CHOICE.findall(response)
        given = found[-1].upper() if found else None
        correct = given == reference(problem).strip().upper()
        return Score(reward=float(correct), correct=correct, answer=given)


class ChoiceLineOfAnyLanguage:
    """The same, with ``Answer:`` and the letters in any language of MMLU's translations."""

    def score(self, problem: Problem, response: str) -> Score:
        """Compare the letters; a response without such a line is wrong."""
        found = _CHOICE_ANYWHERE.findall(_MARKUP.sub("", response))
        given = _LETTERS[found[-1].upper()] if found else None
        wanted = reference(problem).strip().upper()
        correct = given == _LETTERS.get(wanted, wanted)
        return Score(reward=float(correct), correct=correct, answer=given)


def normalised(answer: str) -> str:
    """Return an answer in the form in which it is compared."""
    text = answer.strip().strip("*").strip()
    while (inner := _WRAPPED.sub(r"\1", text)) != text:
        text = inner
    text = _NOISE.sub("", _FRACTION.sub(r"\\frac", text)).rstrip(".")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
