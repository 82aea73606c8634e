"""Ctrl-C at exact moments of the first seconds of a supervised run: one line, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runs.running import write_config

INTERRUPTING = """
import os, signal, sys
whose, moment, marker = os.environ["INTERRUPTED_AT"].split(":")
is_coordinator = "--supervised-by" in sys.orig_argv
if "--supervise" in sys.orig_argv or is_coordinator:
    pid, num_imports = os.getpid(), 0
    begin = "tandem.coordinator" if is_coordinator else "tandem.coordinator.cli"
    def interrupt(event, arguments):
        global num_imports
        if event != "import" or os.getpid() != pid:
            return
        if num_imports or arguments[0].startswith(begin):
            num_imports += 1
        if num_imports == int(moment) and whose == ("coordinator" if is_coordinator else "supervisor"):
            open(marker, "w").close()
            os.kill(os.getppid() if is_coordinator else pid, signal.SIGINT)
    sys.addaudithook(interrupt)
"""
"""Module that Python imports first. It has the supervisor get SIGINT at the n-th import, of its own or of its child."""


@pytest.mark.parametrize("moment", [3, 20, 60, 150, 300, 500])
@pytest.mark.parametrize("whose", ["supervisor", "coordinator"])
def test_an_early_interrupt_of_a_supervised_run_is_one_line(tmp_path: Path, whose: str, moment: int) -> None:
    hooks, marker = tmp_path / "hooks", tmp_path / "interrupted"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(INTERRUPTING)
    environment = {**os.environ, "PYTHONPATH": str(hooks), "INTERRUPTED_AT": f"{whose}:{moment}:{marker}"}
    words = [Path(sys.executable).with_name("coordinator"), "up", write_config(), "--supervise"]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300)
    assert marker.exists(), "it has fewer imports"
    assert ended.returncode == 130, ended
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("interrupted"), lines
