r"""Environments that read the line after ``Answer:``, beside those of NeMo-RL v0.7.

Rewards of NeMo-RL are those of nemo_rl/environments/dapo_math_verifier.py and nemo_rl/environments/math_environment.py
(`EnglishMultichoiceVerifyWorker`), release v0.7. The first is adapted from verl/utils/reward_score/math_dapo.py, and
200,000 random compositions of texts such as those below have the same normal form in verl 0.9.1 and here.
"""

from __future__ import annotations

import pytest
from environment_harness import config

from tandem.common.messages import Problem
from tandem.rollout.environments import Score, make_environment

DAPO = {"math_verify_impl": "dapo_math_verify"}
ENGLISH = {"verifier_type": "english_multichoice"}


def scored(settings: dict[str, str], answer: str, response: str) -> Score:
    problem = Problem(problem_id="p", question="", answer=answer, metadata={})
    score = make_environment(config("math", settings)).score(problem, response)
    assert isinstance(score, Score)
    assert score.reward == score.correct
    return score


@pytest.mark.parametrize(
    ("answer", "response", "given"),
    [
        ("34", "so it is 12.\nAnswer: 34", "34"),
        ("34", "Answer: 12\nno.\nAnswer: $\\boxed{34}$", "34"),
        ("1234", "answer: 1,234", "1234"),
        ("\\frac{1}{2}", "Answer: \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\frac{1}{2}", "Answer: \\frac12", "\\frac{1}{2}"),
        ("\\sqrt{2}", "Answer: \\sqrt2", "\\sqrt{2}"),
        ("34", "Answer: 34 dollars", "34"),
        ("34", "Answer: x = 34", "34"),
        ("34", "Answer: 34^\\circ", "34"),
        ("34", "Answer: 34^{\\circ}", "34"),
        ("34", "Answer: \\$34", "34"),
        ("34", "Answer: $34$.", "34"),
        ("34", "Answer: $34$ square units", "34"),
        ("34", "Answer: 34\\text{ cm}", "34"),
        ("34", "Answer: 34\\text{m}^2", "34"),
        ("B", "Answer: \\textbf{B}", "B"),
        ("34 dollars", "Answer: 34", "34"),
        ("3,4", "Answer: 3\\text{ and }4", "34"),
    ],
)
def test_dapos_answers_are_compared_in_their_normal_form(answer: str, response: str, given: str) -> None:
    assert scored(DAPO, answer, response) == Score(1.0, True, answer=given)


@pytest.mark.parametrize(
    ("answer", "response", "given"),
    [
        ("34", "**Answer: 34**", "34**"),
        ("34", "Answer: **34**", "**34**"),
        ("34", "Answer: 34.", "34."),
        ("34", "Answer: $x = 34$.", "34."),
        ("34", "Answer: 34, or 35", "34,or35"),
        ("34", "Answer: \\boxed{\\boxed{34}}", "\\boxed{34}"),
        ("\\frac{1}{2}", "Answer: \\dfrac{1}{2}", "\\dfrac{1}{2}"),
        ("34", "It is 34.", None),
        ("34", "Answer: 34\n" + "But no. " * 50, None),
    ],
)
def test_dapos_wrong_answers(answer: str, response: str, given: str | None) -> None:
    score = scored(DAPO, answer, response)
    assert (score.answer, score.correct) == (given, False)


@pytest.mark.parametrize(
    "response",
    [
        "Answer: C",
        "**Answer**: C",
        "**Answer: C**",
        "Answer: **C**",
        "Answer: \\boxed{C}",
        "Answer: $\\boxed{C}$",
        "Answer: $\\boxed{\\text{C}}$",
        "Answer: \\text{C}",
        "Answer: \\mathrm{C}",
        "Answer: $\\mathbf{C}$",
        "Answer: \\(C\\)",
        "Answer: {C}",
        "Answer: \\{C\\}",
        "Answer: \\boxed C",
        "Answer: \\$C\\$",
        "$\\text{Answer: }$C",
        "answer :\tC.",
    ],
)
def test_a_letter_counts_in_every_form_in_which_it_does_in_nemo_rl(response: str) -> None:
    assert scored(ENGLISH, "C", response) == Score(1.0, True, answer="C")
    assert scored(ENGLISH, "B", response) == Score(0.0, False, answer="C")


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: A\nNo.\nAnswer: **(b)**", "B"),  # the last line counts, in NeMo-RL the first
        ("Answer: c", "C"),  # NeMo-RL finds c, which is not C
        ("Answer: (C)", "C"),  # NeMo-RL finds none
        ("Answer: because", None),  # NeMo-RL finds b
        ("Answer: Cats", None),  # NeMo-RL finds C
        ("\u200bAns\u200dwer: C", "C"),
        ("C", None),
    ],
)
def test_where_letters_differ_from_nemo_rl(response: str, letter: str | None) -> None:
    assert scored(ENGLISH, "C", response).answer == letter


@pytest.mark.parametrize("answer", ["C", "c", "(C)", "C.", "\\boxed{C}", "$\\text{C}$", "**C**"])
def test_references_may_have_the_same_forms(answer: str) -> None:
    assert scored(ENGLISH, answer, "Answer: C").correct
    assert not scored(ENGLISH, answer, "Answer: B").correct


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("thus **Answer: (C)**", "C"),
        ("الإجابة: ب", "B"),
        ("উত্তরঃ ঢ", "D"),
        ("答案：Ａ", "A"),
        ("Answer: A\n次に 答え: B", "B"),
        ("Réponse : $\\boxed{D}$", "D"),
        ("The best answer is E.", "E"),
        ("there is an answer a child would give", None),
        ("Respuesta: Barcelona", None),
        ("الجواب النهائي: ج", "C"),
        ("Re\u0301ponse : B", "B"),
        ("no line", None),
    ],
)
def test_choices_of_any_language(response: str, letter: str | None) -> None:
    environment = make_environment(config("math", {"verifier_type": "multilingual_multichoice"}))
    for wanted in "ABCDE":
        problem = Problem(problem_id="p", question="", answer=wanted, metadata={})
        score = environment.score(problem, response)
        assert (score.reward, score.correct, score.answer) == (float(wanted == letter), wanted == letter, letter)
