"""Files of a newer NeMo-RL in whole runs: what is ignored, what its new keys do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import load_config
from tests.harness.runs.running import coordinator, steps_of, write_config

HEADING = "ignored, since this release does not know them:"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_unknown_keys_are_ignored_on_request_and_a_resumed_run_says_the_same() -> None:
    over = {"grpo": {"max_num_steps": 1, "quorum": 3}, "telemetry": {"enabled": True}}
    config = write_config(over)
    refused = coordinator("check", config)
    assert refused.returncode == 2
    assert refused.stderr.count("--newer") == 2
    checked = coordinator("check", config, "--newer")
    assert checked.returncode == 0, checked.stderr
    ignored = ["  grpo.quorum (3)", '  telemetry ({"enabled": true})']
    ok, heading, *lines = checked.stdout.splitlines()
    assert ok.startswith("OK: grpo")
    assert heading == HEADING
    assert sorted(lines) == ignored
    assert checked.stderr == "", "the list is enough"
    slip = coordinator("check", "--newer", config, "grpo.num_prompt_per_step=4")
    assert slip.returncode == 2
    assert slip.stderr == (
        "error: command line: grpo.num_prompt_per_step: unknown key; did you mean 'num_prompts_per_step'?\n"
    )
    done = coordinator("up", config, "--newer")
    assert done.returncode == 0, done.stderr + done.stdout
    told = [f"note:{line[1:]} is not known to this release: no effect" for line in ignored]
    assert sorted(line for line in done.stdout.splitlines() if "not known to this release" in line) == told
    assert sorted(load_config("run/config.yaml").ignored) == [line.strip() for line in ignored]
    text = config.read_text()
    config.write_text(f"nemo_rl_version: '0.8'\n{text}")
    again = coordinator("up", config, "--resume", "grpo.max_num_steps=2")
    assert again.returncode == 0, again.stderr + again.stdout
    assert sorted(line for line in again.stdout.splitlines() if "not known to this release" in line) == told
    assert [record.step for record in steps_of()] == [1, 2]
    Path("kept.yaml").write_text(Path("run/config.yaml").read_text())  # beside the code that it names
    of_the_run = coordinator("up", "kept.yaml", "--resume", "grpo.max_num_steps=3")
    assert of_the_run.returncode == 0, of_the_run.stderr + of_the_run.stdout
    assert sorted(line for line in of_the_run.stdout.splitlines() if "not known to this release" in line) == told
