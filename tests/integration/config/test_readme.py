"""The README's commands in a copy of the examples, the first typed as it says; the long runs are cut short."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from tests.harness.runs.running import coordinator, copy_examples, steps_of, typed

ROOT = Path(__file__).resolve().parents[3]
SHORT = ["grpo.max_num_steps=2", "grpo.num_prompts_per_step=16", "policy.train_micro_batch_size=64"]


def commands() -> list[str]:
    """Return the coordinator commands of the README's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [match[0] for line in lines if (match := re.search(r"coordinator .*", line))]


def test_the_commands_of_the_readme_run() -> None:
    copy_examples()
    lines = commands()
    assert lines[0] == "coordinator up examples/arithmetic.yaml"
    assert len(lines) == 11
    for command in lines:
        words = command.split()[1:]
        more = SHORT if words[0] == "up" else []
        if "--resume" in words:
            more = ["grpo.max_num_steps=3", *SHORT[1:]]
        # Every process of what is typed imports: once is enough.
        starts = coordinator if Path("results").exists() else partial(typed, "coordinator")
        ended = starts(*words, *more, timeout_s=280)
        assert ended.returncode == 0, f"{command}: {ended.stdout[-2000:]}{ended.stderr}"
        if words[0] == "up":
            assert re.search(r"the model is in (\S+); talk to it: coordinator chat \S+\n", ended.stdout), ended.stdout
    assert [s.step for s in steps_of("results/arithmetic")] == [0, 1, 2, 3]
    assert Path("results/arithmetic/report.png").exists()
    assert Path("results/spelling/report.json").exists()
