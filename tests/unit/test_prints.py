"""What environments print: so many characters a step, the rest counted and said once."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from environment_harness import WAIT_S, config, problem, said

from tandem.common.messages import Problem
from tandem.rollout.environments import printing
from tandem.rollout.environments.environment import Score
from tandem.rollout.environments.outcomes import ScoringCall, outcome_of
from tandem.rollout.environments.printing import MOST, bounded
from tandem.rollout.environments.scorer import EnvironmentScorer
from tandem.samples.tokenizer import Messages

ESCAPES = "\x1b[2J\x1b]0;mine\x07\u202e\x9b31m" * 500_000
"""Clears the screen, names the window, turns the writing round: 8 MB."""
MORE = re.compile(r"^prints of environments, ([a-z0-9 ]+): (\d+) more characters not shown$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_of_step", "_of_minute"):
        monkeypatch.setattr(printing, name, printing._Allowance())


def calls(text: str, *steps: int | None) -> None:
    """Call an environment that prints, for a problem of each step."""

    def prints(problem: Problem, conversation: Messages) -> object:
        print(text, end="")
        return Score(reward=1.0, correct=True)

    for step in steps:
        outcome_of(ScoringCall(1, problem(), (), step), prints, is_multi_turn=False, module="")


def await_all(scorer: EnvironmentScorer, num: int) -> None:
    """Wait until so many responses are scored."""
    deadline = time.monotonic() + WAIT_S
    while num:
        assert time.monotonic() < deadline, f"{num} responses are not scored"
        num -= len(scorer.poll())
        time.sleep(0.001)


def test_the_prints_of_a_step_are_bounded_together_and_the_rest_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls("x" * 1000, *[1] * 100)
    shown, errors = capsys.readouterr()
    assert shown == "x" * MOST
    assert errors == "", "there may be more"
    calls("y", 2)
    shown, errors = capsys.readouterr()
    assert shown == "y"
    assert MORE.findall(errors) == [("step 1", str(100 * 1000 - MOST))]
    calls("y", *[2] * 10, 3)
    assert capsys.readouterr().err == "", "nothing was left out"


def test_calls_of_steps_in_turns_have_no_allowance_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Engines may generate for several steps at once."""
    calls("x" * 1000, *[7, 8] * 100)
    printing.say_left_out()
    shown, errors = capsys.readouterr()
    assert len(shown) == 1000 + MOST
    assert MORE.findall(errors) == [("step 8", str(199 * 1000 - MOST))]


def test_control_characters_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    calls(ESCAPES, 1)
    shown = capsys.readouterr().out
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown) is None
    assert MOST < len(shown) < 10 * MOST, "a control character is written out with up to six others"


def test_where_no_step_is_known_a_minute_is_bounded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing, "_MINUTE_S", 1e9)
    calls("x" * 1000, *[None] * 100)
    assert capsys.readouterr() == ("x" * MOST, "")
    monkeypatch.setattr(printing, "_MINUTE_S", 1e-9)  # another minute
    calls("x", None)
    shown, errors = capsys.readouterr()
    assert shown == "x"
    assert MORE.findall(errors) == [("a minute", str(100 * 1000 - MOST))]


def test_what_nobody_was_asked_for_is_not_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    with bounded(1):
        pass
    print("x" * 2 * MOST, end="")
    assert len(capsys.readouterr().out) == 2 * MOST


@pytest.mark.parametrize("name", ["Prints", "PrintsInThreads", "PrintsInCoroutines"])
def test_wherever_an_environment_runs_its_prints_are_bounded_by_step(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"class": f"own_environments.{name}", "num_workers": 1}
    scorer = EnvironmentScorer(config("mine", settings))
    try:
        scorer.await_ready()
        for step, letter in ((1, "q"), (2, "z")):
            for number in range(4):
                scorer.submit(number, problem(), said(letter * 100), step)
            await_all(scorer, 4)
    finally:
        scorer.close()
    shown, errors = capfd.readouterr()
    for letter in "qz":
        assert 0.98 * MOST <= shown.count(letter) <= MOST
    assert MORE.findall(errors) == [(f"step {step}", str(4 * 100 * 101 - MOST)) for step in (1, 2)]
