"""What help says, and the examples by which whoever has typed what cannot be is answered."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tandem.coordinator import cli

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [name for commands in cli.GROUPS.values() for name in commands]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_is_answered_by_an_example_of_its_own(command: str) -> None:
    program, *words = shlex.split(cli.EXAMPLES[command])
    assert program == "coordinator"
    assert words[0] == (command or "up")
    assert cli._parse(words).command == words[0]
    assert all((ROOT / word).is_file() for word in words if word.startswith("examples/"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert cli.EXAMPLES[command] in capsys.readouterr().out


def test_there_is_no_example_of_what_is_no_command() -> None:
    assert cli.EXAMPLES.keys() == {"", *COMMANDS}


@pytest.mark.parametrize(
    ("word", "meant"), [("upp", "up"), ("chek", "check"), ("kubernets", "kubernetes"), ("zzz", "")]
)
def test_an_unknown_command_says_which_is_meant(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([word, "examples/arithmetic.yaml"])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    hint = f"; did you mean {meant!r}?" if meant else ""
    assert f"coordinator: error: there is no command {word!r}{hint}" in lines
    assert "  start a run: init, check, plan, up, sweep, replay" in lines


def test_every_command_has_one_purpose() -> None:
    assert sorted(COMMANDS) == sorted({*COMMANDS})
