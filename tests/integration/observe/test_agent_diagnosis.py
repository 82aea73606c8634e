"""An agent that crashes is the one cause that `coordinator diagnose` names, whatever becomes of its episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.observe.diagnosis import diagnose
from tests.harness.runs.agent_run_harness import AGENT, configure
from tests.harness.runs.running import coordinator

CRASHES = AGENT.replace("again = ask(question)\n", "raise RuntimeError('a bug of its own')\n")


AT_ONCE = "raise RuntimeError('a bug of its own')\n"
"""Before it has asked for anything, so that no token is learned from."""


@pytest.mark.parametrize(
    ("on_error", "source"), [("fail", CRASHES), ("zero", CRASHES), ("drop", CRASHES), ("zero", AT_ONCE)]
)
def test_a_crashed_agent_has_one_diagnosis(on_error: str, source: str) -> None:
    ended = coordinator("up", configure(source=source, on_error=on_error))
    assert ended.returncode == (1 if on_error == "fail" else 0), ended.stderr
    (finding,) = diagnose(Path("run")).findings
    assert (finding.name, finding.certainty) == ("failing agent", "certain")
    assert "RuntimeError: a bug of its own" in " ".join(finding.evidence)
    assert finding.look_at.startswith("env.agent: its command, timeout_s and on_error")
