"""Texts from processes and from the user's code: short, and without what moves a terminal's cursor."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec
import pytest

from tandem.common.messages import MAX_TEXT, MAX_TRACEBACK, Failed, Problem, SampleScored
from tandem.common.texts import read_last_error, read_last_lines, shorten, visible
from tandem.common.user_code import line
from tandem.coordinator.processes.registry import _readable
from tandem.rollout.environments.environment import Score
from tandem.rollout.environments.outcomes import Failure, ScoringCall, outcome_of
from tandem.samples.tokenizer import Messages

ESC = "\x1b"
LONG = "\x1b[2J\x1b]0;mine\x07\u202e\x9b31m" * 500_000
"""Clears the screen, names the window, turns the writing round: 8 MB."""
CALL = ScoringCall(number=1, problem=Problem(problem_id="1", question="1+1", answer="2", metadata={}), conversation=())


def is_harmless(text: str) -> bool:
    return re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text) is None


@pytest.mark.parametrize(
    "text", [LONG, "x" * 5_000_000, ESC, "a\x1b[31mb\n\tc"], ids=["control", "long", "one", "lines"]
)
def test_what_is_shown_is_harmless_and_short(text: str) -> None:
    began = time.process_time()
    for shown, most in ((shorten(text), 10_000), (line(text), 610), (shorten(text, 50), 50)):
        assert len(shown) <= most
        assert is_harmless(shown)
    assert time.process_time() - began < 5.0
    assert visible("a\x1b[31mb\n\tc") == "a\\x1b[31mb\n\tc"
    assert shorten("a plain text\n\tof two lines") == "a plain text\n\tof two lines"


def test_a_process_that_says_what_failed_is_shown_harmlessly() -> None:
    said = Failed(command_id=1, phase="\x1b[2J", error=ESC * MAX_TEXT, expected=True, traceback=ESC * MAX_TRACEBACK)
    shown = _readable(said)
    assert shown.phase == "\\x1b[2J"
    assert all(map(is_harmless, (shown.error, shown.traceback)))
    msgspec.msgpack.decode(msgspec.msgpack.encode(shown), type=Failed)  # within its bounds still
    assert _readable(plain := Failed(command_id=1, phase="training", error="full", expected=True)) == plain


def test_the_last_lines_of_a_log_are_harmless_short_and_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"first\n{LONG}\nlast\x1b[2J\n")
    lines = read_last_lines(log, 3)
    assert lines[-1] == "last\\x1b[2J"
    assert sum(map(len, lines)) < 5000
    assert all(map(is_harmless, lines))
    log.write_text("")
    assert read_last_lines(log, 3) == []


def test_what_an_environment_raises_or_names_is_harmless() -> None:
    def raises(problem: Problem, conversation: Messages) -> object:
        raise ValueError(LONG)

    def names(problem: Problem, conversation: Messages) -> object:
        return Score(reward=1.0, correct=True, components={"\x1b" * 150: 1.0})

    failure = outcome_of(CALL, raises, is_multi_turn=False, module="")
    assert isinstance(failure, Failure)
    assert is_harmless(failure.what + failure.trace)
    failure = outcome_of(CALL, names, is_multi_turn=False, module="")
    assert isinstance(failure, Failure), "written out, the name is too long for a message"
    assert is_harmless(failure.what)


def test_a_failure_of_a_sample_cannot_be_long_on_the_wire() -> None:
    field = next(each for each in msgspec.structs.fields(SampleScored) if each.name == "failure")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert("x" * 5_000_000, field.type)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("step 1\nerror: no room\nonce that is mended, continue with: ...\n", "error: no room"),
        ("error: one\nerror: two\n2 problems\n", "error: two"),
        ("step 1\nKilled\n\n", "Killed"),
        ("\n", "it has printed nothing"),
    ],
)
def test_the_error_of_a_command_is_what_it_printed_last_but_for_advice(
    printed: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(printed)
    assert read_last_error(tmp_path / "log") == expected
