"""Shell completion at a terminal: what the line is after the tabulator key, in each shell that is installed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.runs.at_terminal import Terminal

SHELLS = ("bash", "zsh", "fish")
_STARTS = {
    "bash": ["bash", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
_SET_UP = {
    "bash": r"""
        show() { printf %s "$READLINE_LINE" > shown.new; mv shown.new shown; }
        bind 'set bell-style none'
        bind 'set page-completions off'
        bind -x '"\C-xb": show'
    """,
    "zsh": """
        autoload -U compinit; compinit -u -D
        show() { print -rn -- "$BUFFER" > shown.new; mv shown.new shown }
        zle -N show; bindkey '^Xb' show
        setopt no_beep
    """,
    "fish": """
        function show; printf %s (commandline) > shown.new; mv shown.new shown; end
        bind \\cxb show
    """,
}
"""Ctrl-X and b write the line into a file."""
_LOADS = {
    "bash": ["source <(coordinator completion bash)"],
    "zsh": ['eval "$(coordinator completion zsh)"', "source <(coordinator completion zsh)"],
    "fish": ["coordinator completion fish | source"],
}
_BECOMES = [
    ("diag", "diagnose "),
    ("--ver", "--version "),
    ("up --rest", "up --restart "),
    ("up conf", "up config.yaml "),
    ("up --restart conf", "up --restart config.yaml "),
    ("up config.yaml --rest", "up config.yaml --restart "),
    ("samples results/run --wo", "samples results/run --worst "),
    ("completion f", "completion fish "),
    ("init --algorithm s", "init --algorithm sft "),
    ("init --task ch", "init --task chain_sum "),
    ("init --engine v", "init --engine vllm "),
    ("init --environment m", "init --environment math "),
    ("init --from prob", "init --from problems.csv "),
    ("eval config.yaml --checkpoints n", "eval config.yaml --checkpoints newest "),
    # Run folders, one and more.
    ("report res", "report results/"),
    ("report results/r", "report results/run/"),
    ("report results/run ear", "report results/run earlier/"),
    ("view results/run ear", "view results/run earlier/"),
    ("report results/run earlier --ou", "report results/run earlier --out "),
    ("eval config.yaml --model results/run ear", "eval config.yaml --model results/run earlier/"),
    # Settings: keys, and values of those that have few; any number of them.
    ("up config.yaml grpo.val_t", "up config.yaml grpo.val_temperature="),
    ("up config.yaml grpo.seed=7 grpo.val_t", "up config.yaml grpo.seed=7 grpo.val_temperature="),
    ("up config.yaml grpo.seed=7 refit.verify=s", "up config.yaml grpo.seed=7 refit.verify=sampled "),
    ("up config.yaml grpo.seed=7 --rest", "up config.yaml grpo.seed=7 --restart "),
    ("replay results/run loss_fn.ratio_clip_ma", "replay results/run loss_fn.ratio_clip_max="),
    (
        "eval config.yaml --model results/run eval.num",
        "eval config.yaml --model results/run eval.num_tests_per_prompt=",
    ),
    # Nothing that fish would find there, either, which takes what has these letters in this order.
    ("up config.yaml grpo.qqq", "up config.yaml grpo.qqq"),
]
"""What is typed behind `coordinator` before the tabulator key, and what is there afterwards."""


@pytest.fixture
def in_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Terminal]:
    """Return what starts a shell in a folder with files and run folders; a shell that is not here skips the test."""
    monkeypatch.chdir(tmp_path)
    for folder in ("results/run", "earlier", "home"):
        Path(folder).mkdir(parents=True)
    for file in ("config.yaml", "problems.csv"):
        Path(file).touch()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def start(shell: str) -> Terminal:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        return Terminal(*_STARTS[shell], env={"TERM": "xterm", "HOME": str(tmp_path / "home"), "PATH": path})

    return start


def _load(terminal: Terminal, shell: str, how: str) -> None:
    Path("set_up").write_text(f"{_SET_UP[shell]}\n{how}\ntouch ready\n")
    terminal.type("source ./set_up\n")
    terminal.read_until_there(Path("ready"))


@pytest.mark.parametrize("shell", SHELLS)
def test_the_tabulator_key_completes(shell: str, in_shell: Callable[[str], Terminal]) -> None:
    with in_shell(shell) as terminal:
        _load(terminal, shell, _LOADS[shell][0])
        found = []
        for typed, _ in _BECOMES:
            terminal.type(f"coordinator {typed}\t\x18b")
            found.append((typed, terminal.read_until_there(Path("shown")).removeprefix("coordinator ")))
            Path("shown").unlink()
            terminal.type("\x15")
        assert found == _BECOMES
        terminal.type("coordinator re\t\t")
        shown = terminal.read_until(r"(?s)refits.*replay.*report")
        assert "Draw samples" not in shown


@pytest.mark.parametrize(("shell", "how"), [(shell, how) for shell in SHELLS for how in _LOADS[shell][1:]])
def test_other_ways_to_load_it(shell: str, how: str, in_shell: Callable[[str], Terminal]) -> None:
    with in_shell(shell) as terminal:
        _load(terminal, shell, how)
        terminal.type("coordinator diag\t\x18b")
        assert terminal.read_until_there(Path("shown")) == "coordinator diagnose "


@pytest.mark.parametrize("shell", SHELLS)
def test_help_says_how_to_load_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.coordinator import cli

    with pytest.raises(SystemExit):
        cli.main(["completion", "--help"])
    assert re.search(rf"{shell}: +{re.escape(_LOADS[shell][0])} +in ~", capsys.readouterr().out)
