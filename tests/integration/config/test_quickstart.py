"""The quickstart is complete: its files in an empty folder, its commands as they stand, cut short where they train."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config import load_config
from tests.harness.runs.running import coordinator, steps_of

DOCS = Path(__file__).resolve().parents[3] / "docs"
QUICKSTART = (DOCS / "quickstart.md").read_text()
SHORT = {
    "coordinator up grpo.yaml": ["grpo.max_num_steps=2"],
    "coordinator up hints.yaml": ["grpo.max_num_steps=1"],
}


def files(page: str) -> dict[str, str]:
    """Return the files that a page has a reader write: a block behind a line that names it."""
    return dict(re.findall(r"^`([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)```", page, re.DOTALL | re.MULTILINE))


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


def test_the_quickstart_is_complete() -> None:
    written = files(QUICKSTART)
    assert [*written] == ["make_data.py", "task.yaml", "rewards.py", "sft.yaml", "grpo.yaml", "hints.py", "hints.yaml"]
    for name, text in written.items():
        Path(name).write_text(text)
    make_data, *rest = commands(QUICKSTART)
    assert make_data == "python make_data.py"
    subprocess.run([sys.executable, "make_data.py"], check=True, timeout=60)
    assert len(rest) == 5
    for command in rest:
        more = [word for begin, words in SHORT.items() if command.startswith(begin) for word in words]
        program, *words = command.split()
        assert program == "coordinator"
        ended = coordinator(*words, *more, timeout_s=250)
        assert ended.returncode == 0, f"{command}: {ended.stdout[-2000:]}{ended.stderr}"
    before, *trained = steps_of("runs/grpo")
    assert [step.step for step in trained] == [1, 2]
    assert 0.1 < before.metrics["val_accuracy"] < 0.6, "SFT shows the form, and leaves something to learn"
    assert all(step.metrics["groups_without_spread"] < 0.9 for step in trained)
    assert Path("runs/grpo/report.png").exists()
    (_, step) = steps_of("runs/hints")
    assert 1 < step.metrics["avg_turns_per_sample"] <= 3


@pytest.mark.parametrize("page", ["migrating.md"])
def test_configurations_of_pages_load(page: str) -> None:
    text = (DOCS / page).read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    Path("run.yaml").write_text(blocks[0])
    config = load_config("run.yaml", to_run=False)
    assert config.grpo.num_generations_per_prompt == 8
    assert config.loss_fn.ratio_clip_max == 0.2
    assert config.env["mine"].class_path == "rewards.Answers"


def test_a_reward_function_of_verl_is_a_class_here() -> None:
    from types import SimpleNamespace

    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (DOCS / "migrating.md").read_text(), re.DOTALL)
        if "Score" in block
    ]
    names: dict[str, type] = {}
    exec(code, names)
    problem = SimpleNamespace(answer="42", metadata={})
    scores = [names["Answers"]().score(problem, response) for response in ("it is 42", "it is 41")]
    assert [(score.reward, score.correct) for score in scores] == [(1.0, True), (0.0, False)]
