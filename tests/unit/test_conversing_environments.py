"""The environments that answer: a calculator, and the sliding puzzle with its problems."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
from environment_harness import worth

from tandem.common.errors import ConfigError, DataError, RewardError
from tandem.common.messages import Problem
from tandem.config import Config, build_config
from tandem.coordinator.data import worked
from tandem.rollout.environments import Score, Turn, make_environment
from tandem.rollout.environments.several_turns import calculate
from tandem.samples.data_sets import load_problems
from tandem.samples.data_sets.sliding_puzzle import MOVES, make_shuffled, make_solved, render, slide

RIGHT, WRONG = Score(1.0, True), Score(0.0, False)


def puzzle_config(params: dict[str, Any] | None = None, cfg: dict[str, Any] | None = None, **data: Any) -> Config:
    return build_config(
        {
            "grpo": {"max_rollout_turns": 9, "seed": data.pop("seed", 1)},
            "policy": {"model_name": "model"},
            "data": {"dataset_name": "sliding_puzzle", "num_train": 40, "num_validation": 10, **data}
            | ({} if params is None else {"task_params": params}),
            "env": {"sliding_puzzle_game": {"cfg": cfg or {}}},
        }
    )


def calculator(**kwargs: Any) -> Any:
    return make_environment(
        build_config(
            {
                "grpo": {"max_rollout_turns": 3},
                "policy": {"model_name": "model"},
                "data": {"dataset_name": "reasoning_gym", "task": "products"},
                "env": {"calculator": {"kwargs": kwargs}},
            }
        )
    )


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("assistant", "user")[index % 2], "content": text} for index, text in enumerate(texts)]


# --- the calculator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"),
        (" 12 * 7 ", "84"),
        ("-3 + 2*(4 - 1)", "3"),
        ("7/2", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("999999999999 * 999999999999", "999999999998000000000001"),
        ("1/0", "error"),
        ("1 +", "error"),
        ("2**9", "error"),
        ("(1)(2)", "error"),
        ("007", "error"),
        ("a + 1", "error"),
        ("", "error"),
        ("(" * 99 + "1", "error"),
        ("9" * 101, "error"),
        ("1/" + "9" * 90, "1e-90"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_a_call_is_answered_and_anything_else_is_the_answer() -> None:
    environment = calculator()
    problem = Problem(problem_id="p", question="", answer="84", metadata={"expression": "12 * 7"})
    assert environment.step(problem, said("calc(12*7)")) == Turn([{"role": "user", "content": "84"}])
    assert environment.step(problem, said("so calc((5+7)*7) it is")) == Turn([{"role": "user", "content": "84"}])
    assert worth(environment.step(problem, said("calc(12*7)", "84", "84"))) == RIGHT
    for response, score in (("84.0", RIGHT), (" +84", RIGHT), ("83", WRONG), ("calc(12*7", WRONG), ("", WRONG)):
        assert worth(environment.step(problem, said(response))) == score, response
    with pytest.raises(RewardError, match="no reference answer"):
        environment.step(Problem(problem_id="p", question="", answer="", metadata={}), said("84"))


def test_the_calculator_has_a_role_and_finds_the_answer() -> None:
    environment = calculator(role="tool", answer_after="=")
    problem = Problem(problem_id="p", question="", answer="x", metadata={})
    assert environment.step(problem, said("calc(1)")) == Turn([{"role": "tool", "content": "1"}])
    assert worth(environment.step(problem, said("y = x"))) == RIGHT
    assert worth(environment.step(problem, said("x = y"))) == WRONG


def test_worked_conversations_are_those_that_the_calculator_would_have() -> None:
    environment = calculator()
    problem = Problem(problem_id="p", question="", answer="84", metadata={"expression": "12 * 7"})
    call, result, answer = worked.calculator(problem)
    assert environment.step(problem, [call]) == Turn([result])
    assert worth(environment.step(problem, [call, result, answer])) == RIGHT


# --- the sliding puzzle ----------------------------------------------------------------------------------------------


def test_tiles_slide_into_the_gap() -> None:
    board = (1, 2, 3, 4, 0, 5, 7, 8, 6)
    assert render(board, 3) == "123\n4_5\n786"
    after = {move: slide(board, 3, move) for move in MOVES}
    assert {move: render(b, 3) for move, b in after.items() if b is not None} == {
        "up": "123\n485\n7_6",
        "down": "1_3\n425\n786",
        "left": "123\n45_\n786",
        "right": "123\n_45\n786",
    }
    assert slide(make_solved(3), 3, "up") is None
    assert slide(make_solved(3), 3, "left") is None
    assert render(make_solved(4), 4).splitlines()[-1] == "13 14 15  _"


@pytest.mark.parametrize(("size", "num_moves"), [(2, 3), (3, 9), (5, 30)])
def test_a_shuffle_comes_with_the_way_back(size: int, num_moves: int) -> None:
    for seed in range(20):
        board, moves = make_shuffled(random.Random(seed), size, num_moves)
        assert len(moves) == num_moves
        assert sorted(board) == list(range(size * size))
        boards = [board]
        for move in moves:
            after = slide(boards[-1], size, move)
            assert after is not None
            boards.append(after)
        assert boards[-1] == make_solved(size)
        assert all(a != c for a, c in zip(boards, boards[2:], strict=False)), "no move undoes the one before"


def test_puzzles_are_seeded_distinct_and_held_out() -> None:
    problems = load_problems(puzzle_config())
    assert problems == load_problems(puzzle_config())
    assert (len(problems.train), len(problems.validation)) == (40, 10)
    questions = [problem.question for problem in (*problems.train, *problems.validation)]
    assert len(set(questions)) == 50
    assert render(make_solved(3), 3) not in questions
    others = load_problems(puzzle_config(seed=2))
    assert [p.question for p in others.train] != [p.question for p in problems.train]
    # A board that one run is validated on is trained on by no other, whatever its seed.
    held_out = {problem.question for problem in (*problems.validation, *others.validation)}
    assert not held_out & {problem.question for problem in (*problems.train, *others.train)}
    identifiers = [problem.problem_id for problem in (*problems.train, *problems.validation)]
    assert len(set(identifiers)) == 50


def test_puzzle_parameters_come_from_the_environment_unless_the_data_has_them() -> None:
    game = {"game_config": {"size": 2, "shuffle_moves": 6}, "max_moves": 3}
    config = puzzle_config(cfg=game, num_train=5, num_validation=1)
    assert {problem.metadata["size"] for problem in load_problems(config).train} == {2}
    config = puzzle_config({"size": 4}, cfg=game)
    assert {problem.metadata["size"] for problem in load_problems(config).train} == {4}


@pytest.mark.parametrize(
    ("params", "kind", "message"),
    [
        ({"sise": 3}, ConfigError, "data.task_params: Object contains unknown field `sise` (parameters of"),
        ({"size": 1}, ConfigError, "data.task_params: Expected `int` >= 2 - at `$.size` (parameters of"),
        (
            {"size": 2},
            DataError,
            "data.dataset_name 'sliding_puzzle' has only 11 distinct problems with these task_params: ",
        ),
    ],
)
def test_puzzles_that_cannot_be_made(params: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        load_problems(puzzle_config(params))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_worked_games_are_won_by_the_rules_of_the_environment() -> None:
    config = puzzle_config()
    environment: Any = make_environment(config)
    for problem in load_problems(config).train:
        messages = worked.sliding_puzzle(problem)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index, following in itertools.pairwise(turns):
            assert following == index + 2
            assert environment.step(problem, messages[: index + 1]) == Turn([messages[index + 1]])
        assert environment.step(problem, messages) == RIGHT


def test_moves_that_are_none_leave_the_board() -> None:
    environment: Any = make_environment(puzzle_config(cfg={"max_moves": 4}))
    board = (1, 2, 3, 4, 5, 0, 7, 8, 6)
    problem = Problem(problem_id="p", question="", answer="", metadata={"size": 3, "board": list(board)})
    shown = Turn([{"role": "user", "content": render(board, 3)}])
    for response in ("left", "jump", "", "lr", "I go up", "<action></action>"):
        assert environment.step(problem, said(response)) == shown, response
    for response in ("up", "U", " up\n", "<action>down</action> no: <ACTION> Up </ACTION>"):
        assert environment.step(problem, said(response)) == RIGHT, response
    game = said("left", "", "r", "", "l", "", "up")
    assert environment.step(problem, game) == RIGHT
    assert environment.step(problem, game[:-1] + said("down")) == WRONG  # the fourth response is the last
    assert isinstance(environment.step(problem, game[:5]), Turn)


def test_a_misspelt_setting_of_the_game_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^env.sliding_puzzle_game: ValueError: cfg has no 'max_move', only"):
        make_environment(puzzle_config(cfg={"max_move": 4}))


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_environments_of_the_page_do_what_it_says() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    problem = Problem(problem_id="p", question="", answer="7", metadata={})
    assert names["Brevity"]().score(problem, "77") == Score(-2.0, correct=True)
    guess = names["Guess"]()
    assert guess.step(problem, said("3")) == Turn([{"role": "user", "content": "higher"}], reward=-0.1)
    assert guess.step(problem, said("3", "higher", "7")) == RIGHT
