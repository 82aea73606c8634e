"""NeMo-RL's reward functions for images: its published values, and closed forms of GIoU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from environment_harness import config, results
from environment_harness import problem as problem_of

from tandem.common.errors import ConfigError
from tandem.config import Config
from tandem.rollout.environments import Score, make_environment
from tandem.rollout.environments.scorer import EnvironmentScorer
from tandem.rollout.environments.vision import bbox_giou, exact_alnum, has_format, math_expr
from tests.harness.nemo_rl_math import judge

CLEVR = [{"name": "format", "weight": 0.2}, {"name": "exact_alnum", "weight": 0.8}]
GEOMETRY = [{"name": "format", "weight": 0.1}, {"name": "math_expr", "weight": 0.9}]
REFCOCO = [
    {"name": "format", "weight": 0.1},
    {"name": "bbox_giou", "weight": 0.9, "kwargs": {"giou_penalty_thres": 0.5}},
]


def environment(name: str, functions: list[dict[str, Any]]) -> Config:
    return config(name, {"reward_functions": functions})


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>so</think> <answer>4</answer>", 1.0),
        ("<think>one\ntwo</think>", 0.25),
        ("so <answer></answer> it is", 0.75),
        ("</answer>4<answer>", 0.0),
        ("<answer>4", 0.0),
        ("4", 0.0),
    ],
)
def test_format_is_a_quarter_for_the_reasoning_and_three_for_the_answer(response: str, value: float) -> None:
    assert has_format("4", response) == (value, None)


@pytest.mark.parametrize(
    ("reference", "response", "is_right"),
    [
        ("Blue", "<answer> blue. </answer>", True),
        ("4", "<answer>4</answer>", True),
        ("4", "4", False),
        ("4", "<answer>4</answer> or <answer>5</answer>", False),  # all between the first and the last tag
        ("large cube", "<answer>Large-Cube!</answer>", True),
        ("éclair", "<answer>Éclair</answer>", True),
        ("4", "<answer>four</answer>", False),
    ],
)
def test_letters_and_digits_are_compared(reference: str, response: str, is_right: bool) -> None:
    assert exact_alnum(reference, response) == (float(is_right), is_right)


@pytest.mark.parametrize(
    ("reference", "response", "is_right"),
    [
        (r"\frac{1}{2}", "<answer>0.5</answer>", True),
        ("2\\sqrt{221}", r"<answer>\boxed{2 \sqrt{221}}</answer>", True),
        ("3", "<answer>3.0</answer>", True),
        ("3", "<answer>4</answer>", False),
        ("3", "3", False),
        ("3", "<answer></answer>", False),
        ("x+1", "<answer>1 + x</answer>", True),
    ],
)
def test_expressions_are_compared_by_value(reference: str, response: str, is_right: bool) -> None:
    assert math_expr(reference, response) == (float(is_right), is_right)


def test_expressions_are_compared_as_the_library_does_for_nemo_rl() -> None:
    """math-verify's own metric with NeMo-RL's settings, over references and answers of every kind."""
    answers = ["3", "3.0", "x^2", r"\frac{1}{2}", "0.5", "50", r"2\sqrt{3}", "(1,2)", "word", "1e3", "1,000", "x=3", ""]
    for reference in answers[:-1]:
        for answer in answers:
            expected = judge(reference, rf"\boxed{{{answer}}}")
            assert math_expr(reference, f"<answer>{answer}</answer>")[0] == expected, (reference, answer)


def giou(one: list[float], other: list[float], **how: float) -> float:
    return bbox_giou(str(one), f"<answer>{other}</answer>", **how)[0]


def test_giou_has_its_closed_forms() -> None:
    whole = [0, 0, 1000, 1000]
    assert giou(whole, whole) == 1.0
    assert giou(whole, [0, 0, 500, 1000]) == 0.5  # within: the hull is the union
    # Side by side without a gap: nothing in common, and the hull is the union.
    assert giou([0, 0, 10, 10], [10, 0, 20, 10]) == 0.0
    # Two squares of side a with a gap of g between them: -(g a) / ((2 a + g) a).
    assert giou([0, 0, 10, 10], [30, 0, 40, 10]) == pytest.approx(-20 / 40)
    # Shifted by half their side both ways: common 25, union 175, hull 225.
    assert giou([0, 0, 10, 10], [5, 5, 15, 15]) == pytest.approx(25 / 175 - 50 / 225)
    # Points far apart: the limit.
    assert giou([0, 0, 0, 0], [1000, 1000, 1000, 1000]) == pytest.approx(-1.0, abs=1e-6)


def test_far_boxes_cost_only_below_the_threshold() -> None:
    shifted = ([0, 0, 10, 10], [5, 0, 15, 10])  # common 50, union 150, hull 150
    assert giou(*shifted) == giou(*shifted, giou_penalty_thres=0.0) == pytest.approx(1 / 3)
    diagonal = ([0, 0, 10, 10], [1, 1, 11, 11])  # common 81, union 119, hull 121
    assert giou(*diagonal, giou_penalty_thres=0.5) == pytest.approx(81 / 119)
    assert giou(*diagonal) == pytest.approx(81 / 119 - 2 / 121)
    assert bbox_giou("[0, 0, 10, 10]", "<answer>[1, 1, 11, 11]</answer>")[1] is True
    assert bbox_giou("[0, 0, 10, 10]", "<answer>[5, 0, 15, 10]</answer>")[1] is False


def test_giou_is_within_its_bounds_and_symmetric() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        one, other = ([*map(min, ends), *map(max, ends)] for ends in (_ends(generator), _ends(generator)))
        value = giou(one, other)
        assert -1.0 <= value <= 1.0
        assert value == pytest.approx(giou(other, one))
        assert value <= giou(one, other, giou_penalty_thres=-1.0)


def _ends(generator: random.Random) -> list[tuple[int, int]]:
    return [(generator.randint(0, 1000), generator.randint(0, 1000)) for _ in range(2)]


@pytest.mark.parametrize(
    "answer",
    [
        "[1, 2, 3]",
        "[1, 2, 3, 4, 5]",
        "a box",
        "[1, 2, 3, nan]",
        "[0, 0, inf, inf]",
        "[1000, 1000, 0, 0]",  # turned: by NeMo-RL's formula worth as much as one likes
        "[10, 0, 0, 10]",
    ],
)
def test_what_is_no_box_is_worth_nothing(answer: str) -> None:
    assert bbox_giou("[100, 100, 200, 200]", f"<answer>{answer}</answer>") == (0.0, False)


def test_tags_have_other_names() -> None:
    said = "<reason>so</reason><final>4</final>"
    tags = {"think_tag": "reason", "answer_tag": "final"}
    assert has_format("4", said, **tags) == (1.0, None)
    assert exact_alnum("4", said, answer_tag="final") == (1.0, True)
    assert math_expr("4", said, tag="final") == (1.0, True)
    assert bbox_giou("[0, 0, 1, 1]", "<final>0, 0, 1, 1</final>", answer_tag="final") == (1.0, True)


def test_the_reward_is_the_mean_by_weight() -> None:
    scorer = make_environment(environment("clevr-cogent", CLEVR))
    score: Callable[..., Score] = scorer.score  # type: ignore[union-attr]
    right = score(problem_of("Blue"), "<think>it is</think><answer>blue</answer>")
    assert (right.reward, right.correct, right.answer) == (pytest.approx(1.0), True, "blue")
    wrong = score(problem_of("Blue"), "<answer>red</answer>")
    assert (wrong.reward, wrong.correct) == (pytest.approx(0.2 * 0.75), False)
    assert wrong.components == {"format": 0.75, "exact_alnum": 0.0}
    only_form = make_environment(environment("vlm", [{"name": "format", "weight": 3}]))
    assert only_form.score(problem_of("1"), "<answer>1</answer>").correct is False  # type: ignore[union-attr]
    other_weights = make_environment(environment("vlm", [{**CLEVR[0], "weight": 1}, {**CLEVR[1], "weight": 3}]))
    assert other_weights.score(problem_of("1"), "<answer>1</answer>").reward == pytest.approx(  # type: ignore[union-attr]
        (0.75 + 3.0) / 4
    )


@pytest.mark.parametrize(
    ("name", "functions", "reference", "response", "reward"),
    [
        ("clevr-cogent", CLEVR, "yes", "<think>so</think><answer>Yes</answer>", 1.0),
        ("geometry3k", GEOMETRY, "2\\sqrt{5}", "<answer>\\sqrt{20}</answer>", 0.1 * 0.75 + 0.9),
        ("refcoco", REFCOCO, "[0, 0, 10, 10]", "<answer>[0, 0, 10, 5]</answer>", 0.1 * 0.75 + 0.9 * 0.5),
    ],
)
def test_environments_score_in_their_processes(
    name: str, functions: list[dict[str, Any]], reference: str, response: str, reward: float
) -> None:
    scorer = EnvironmentScorer(environment(name, functions))
    try:
        scorer.await_ready()
        (score,) = results(scorer, response, of=problem_of(reference))
    finally:
        scorer.close()
    assert isinstance(score, Score)
    assert score.reward == pytest.approx(reward)
    assert math.isfinite(score.reward)


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ([], "env.vlm.reward_functions: required, such as"),
        ([{"name": "exact_alpha", "weight": 1}], "[0].name: 'exact_alpha' is not built; did you mean 'exact_alnum'?"),
        ([{"name": "geo3k", "weight": 1}], "[0].name: 'geo3k' is not built: format, exact_alnum, math_expr and bbox"),
        ([{"name": "format"}], "reward_functions[0]: object missing required field `weight`"),
        ([{"name": "format", "weight": -1}], "reward_functions[0]: expected `float` >= 0.0"),
        ([{"name": "format", "weight": 0}], "reward_functions: no weight is greater than 0"),
        ([*CLEVR, CLEVR[0]], "has a function twice"),
        (
            [{"name": "format", "weight": 1, "kwargs": {"tag": "a"}}],
            "[0].kwargs.tag: format has no such argument, but think_tag and answer_tag",
        ),
        ([{"name": "math_expr", "weight": 1, "kwargs": {"tag": "a("}}], "[0].kwargs.tag: 'a(' is not a tag"),
        (
            [{"name": "bbox_giou", "weight": 1, "kwargs": {"giou_penalty_thres": "a"}}],
            "[0]: expected `float`, got `str` - at `$.kwargs.giou_penalty_thres`",
        ),
    ],
)
def test_functions_that_do_not_exist_are_refused(functions: list[dict[str, Any]], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment("vlm", functions)
    assert expected in str(caught.value)
