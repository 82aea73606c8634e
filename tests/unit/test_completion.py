"""Shell completion, by a bash that has loaded it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.coordinator import cli

Complete = Callable[..., list[str]]
_ASK = """
source script.sh
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
_tandem_coordinator 2>errors.txt
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complete:
    """Return what asks bash for the completions of a line's last word; '=' is a word of its own, as bash has it."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "script.sh").write_text(capsys.readouterr().out)
    (tmp_path / "ask.sh").write_text(_ASK)

    def ask(*words: str) -> list[str]:
        command = ["bash", "--norc", "ask.sh", "coordinator", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return sorted(set(done.stdout.split()))

    return ask


def test_subcommands_and_options(complete: Complete) -> None:
    assert {"up", "check", "eval", "init", "replay", "report"} <= set(complete(""))
    assert complete("re") == ["refits", "replay", "report"]
    assert {"--resume", "--restart", "--from"} <= set(complete("up", "--"))
    assert complete("eval", "config.yaml", "--checkpoints", "") == ["all", "best", "newest"]
    assert complete("completion", "") == ["bash", "fish", "zsh"]


def test_files_and_folders(complete: Complete) -> None:
    Path("config.yaml").touch()
    Path("results/run").mkdir(parents=True)
    assert complete("up", "conf") == ["config.yaml"]
    assert complete("report", "results/") == ["results/run"]
    assert complete("eval", "config.yaml", "--model", "resu") == ["results"]


def test_keys_of_the_schema_and_their_values(complete: Complete) -> None:
    assert complete("up", "config.yaml", "grpo.val_t") == ["grpo.val_temperature="]
    assert complete("up", "config.yaml", "grpo.seed", "=", "7", "policy.generation.back") == [
        "policy.generation.backend="
    ]
    assert complete("up", "config.yaml", "policy.generation.backend", "=") == ["transformers", "vllm"]
    assert complete("check", "config.yaml", "refit.verify", "=", "s") == ["sampled"]
    assert complete("replay", "run", "grpo.overlong_filtering", "=", "") == ["false", "true"]
    assert complete("up", "config.yaml", "grpo.seed", "=", "") == []


def test_a_key_is_followed_by_no_space(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "ask.sh").write_text(
        _ASK.replace("printf", 'compopt() { echo "compopt $*"; }; _tandem_coordinator; printf')
    )
    assert "nospace" in complete("up", "config.yaml", "grpo.val_t")
    assert "nospace" not in complete("up", "conf")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_theirs(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "grpo.val_temperature=" in script
    assert "_tandem_settings" in script
    if (found := shutil.which(shell)) is not None:
        (tmp_path / "script").write_text(script)
        assert subprocess.run([found, "-n", tmp_path / "script"], check=False, timeout=60).returncode == 0


def test_the_command_line_stays_quick_to_start() -> None:
    code = "import sys, tandem.coordinator.cli; print('shtab' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
