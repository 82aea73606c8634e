r"""The `math` environment beside the one of NeMo-RL v0.7, and where it decides otherwise.

The judge is what nemo_rl/environments/math_environment.py (`HFVerifyWorker`, v0.7) calls: `math_metric` of math-verify
0.9, with ``\boxed{reference}`` read as LaTeX, and the response as LaTeX or a plain expression. Of 24,200 pairs of other
answers, boxed and plain, 35 differ, all by the rules that the tests below name.
"""

from __future__ import annotations

import pytest
from environment_harness import config

from tandem.common.messages import Problem
from tandem.rollout.environments import make_environment
from tests.harness.nemo_rl_math import judge

REFERENCES = (
    "3*x**2 + 1",
    r"\frac{\pi}{4} + 2k\pi, k \in \mathbb{Z}",
    "0.00001",
    "1e-05",
    "7",
    "1,234",
    r"2\frac{2}{3}",
    r"$\sqrt{8}$",
    "x^2 + 2x + 1",
    "[0, 1)",
    "(1,2)",
    r"\{1,2\}",
    r"x \in \{1, 2\}",
    r"\frac{1}{30}",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
    r"\text{even}",
    r"\text{(B)}",
    r"\infty",
    "2+3i",
    "x > 1",
    r"90^\circ",
    "no solution",
    "so it is 42.",
)
RESPONSES = (
    "1",
    r"\boxed{2}",
    "-5",
    " = 7",
    "It is \\boxed{7}.",
    "I had 1,234.",
    "8/3",
    r"thus $2\sqrt{2}$",
    "so we get $(x+1)^2$",
    "the interval $[0,1)$",
    r"\boxed{1,2}",
    r"\boxed{2,1}",
    r"\boxed{\{2,1\}}",
    "0.033333",
    "0.03333",
    r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}",
    r"\boxed{\text{even}}",
    r"\boxed{B}",
    r"\boxed{\infty}",
    r"\boxed{3i+2}",
    r"\boxed{1<x}",
    r"\boxed{90}",
    "The answer is 42.",
    "no idea",
    "",
)


MIXED = (
    "2 2/3",
    "2  2/3",
    "2\u20092/3",
    "2 2\u20443",
    "2⅔",
    "2 ⅔",
    r"2\tfrac{2}{3}",
    r"2\frac23",
    r"2\ \dfrac{2}{3}",
    r"$2~\frac{2}{3}$",
    r"$2\,\frac23$",
    r"\boxed{2⅔}",
    r"\boxed{2 2/3}",
    r"\boxed{2\tfrac{2}{3}}",
)
"""Ways to write a mixed number, of which math-verify reads only some, and others as one of its parts."""


def is_right(reference: str, response: str, question: str = "") -> bool:
    problem = Problem(problem_id="p", question=question, answer=reference, metadata={})
    score = make_environment(config("math")).score(problem, response)
    assert score.reward == score.correct
    return score.correct


# A point is not a set here.
DIFFERENT = {("(1,2)", r"\boxed{\{2,1\}}")}


@pytest.mark.parametrize("reference", REFERENCES)
def test_references_and_responses_are_read_as_in_nemo_rl(reference: str) -> None:
    for response in RESPONSES:
        if (reference, response) not in DIFFERENT:
            assert is_right(reference, response) == (judge(reference, response) > 0), response


@pytest.mark.parametrize("reference", REFERENCES)
def test_the_reference_itself_is_right(reference: str) -> None:
    assert is_right(reference, reference)
    assert is_right(reference, f"\\boxed{{{reference}}}")


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        # What does not parse as LaTeX has no value: not that of its last number.
        ("3*x**2 + 1", "1"),
        (r"\frac{\pi}{4} + 2k\pi, k \in \mathbb{Z}", r"\boxed{2}"),
        # mixed numbers
        ("2", "2 2/3"),
        ("2 2/3", "4/3"),
        *((wrong, mixed) for mixed in MIXED for wrong in ("2", "2/3", "3", "22/3")),
        # small numbers
        ("1/2^{99}", "1/2^98"),
        (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}"),
        ("0.0000001", "0.0000002"),
        ("0.00001234", "0.00001235"),
        (r"\{0.0000001, 1\}", r"\boxed{\{0.0000002, 1\}}"),
        (r"\begin{pmatrix}1\\0.0000001\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\0.0000002\end{pmatrix}}"),
        # points and sets
        ("(1,2)", r"\boxed{\{1,2\}}"),
        (r"\{1,2\}", r"\boxed{(1,2)}"),
        (r"\{1,2\}", r"\boxed{\left(2, 1\right)}"),
        # letters in another order
        ("ABC", r"\boxed{CAB}"),
        (r"\text{ABC}", r"\boxed{CAB}"),
        ("DBCA", r"\boxed{\text{ABCD}}"),
        ("New York", r"\boxed{York New}"),
        ("B2C3", r"\boxed{C3B2}"),
        # numbers of two bases
        ("1010_2", r"\boxed{1010_3}"),
        ("1010_{2}", "$1010_{16}$"),
        # percentages
        ("9", "9%"),
        ("9", r"\boxed{9\%}"),
        ("9", r"It is 9\%."),
        (r"9\%", "9"),
    ],
)
def test_other_answers_are_wrong(reference: str, response: str) -> None:
    assert not is_right(reference, response)


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        *(("8/3", mixed) for mixed in MIXED),
        *(("-8/3", f"-{mixed}") for mixed in MIXED if not mixed.startswith(("$", "\\b"))),
        ("2 2/3", "8/3"),
        ("2⅔", "8/3"),
        ("1/2", "½"),
        ("1/2", "1\u20442"),
        (r"\frac{4}{3}x", r"$2\frac{2}{3}x$"),
        (r"2\frac{2}{3}", "2 2/3"),
        ("-2 2/3", r"\boxed{-\frac{8}{3}}"),
        ("1/2^{99}", "1/2^99"),
        ("0.0000001", r"\boxed{10^{-7}}"),
        (r"3 \times 10^{-8}", r"\boxed{0.00000003}"),
        (r"\frac{\pi}{100}", "0.031416"),
        ("1/3", "0.333333"),
        ("(1,2)", r"\boxed{(1, 2)}"),
        ("(1,2)", r"\boxed{1, 2}"),
        (r"x = \{1,2\}", r"\boxed{\left\{2, 1\right\}}"),
        ("ABC", r"\boxed{\text{abc}}"),
        ("xy", r"\boxed{yx}"),
        ("a_1b_2", r"\boxed{b_2a_1}"),
        ("2xy", r"\boxed{2yx}"),
        ("x2y", r"\boxed{2xy}"),
        ("New York", r"\boxed{new york}"),
        ("1010_2", r"\boxed{1010_{2}}"),
        ("1010_2", r"\boxed{1010}"),
        ("0.09", r"It is 9\%."),
        (r"9\%", r"It is 9 \%."),
        ("0.09", "9%"),
        (r"9\%", r"\boxed{0.09}"),
        (r"9\%", r"\boxed{9\%}"),
        ("18", r"It costs \$18."),
        (r"\$18", r"It costs \$18."),
        ("18.50", r"\$18.50"),
        ("-3", "so it is \u22123"),
        ("42", "\u200b\\boxed{42}\ufeff"),
    ],
)
def test_equal_values_are_right(reference: str, response: str) -> None:
    assert is_right(reference, response)


@pytest.mark.parametrize("question", ["What percent of 200 is 18?", r"Give the rate in \%.", "Wie viel Prozent?"])
def test_a_question_for_a_percentage_leaves_out_the_sign_or_not(question: str) -> None:
    assert is_right("9", "9%", question)
    assert is_right(r"9\%", "9", question)
    assert is_right("0.09", "9%", question)
    assert not is_right("0.9", "9%", question)
