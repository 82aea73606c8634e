"""The documentation is true: commands print what it quotes, and its code is the code that is tested."""

from __future__ import annotations

import re

import pytest

from tests.harness.runs.pages_harness import ROOT, quoted
from tests.harness.runs.running import coordinator, copy_examples, steps_of

REFIT = (ROOT / "docs" / "refit.md").read_text()
REPLAY = (ROOT / "docs" / "replay.md").read_text()
ASYNCHRONOUS = (ROOT / "docs" / "asynchronous.md").read_text()
MOST_LINES = 60


def printed(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def without_times(lines: list[str]) -> list[str]:
    """Return lines in which what differs from run to run is masked: digests, and numbers of two decimals."""
    masked = (re.sub(r"\b[0-9a-f]{16}\b", "DIGEST", re.sub(r"\b\d+\.\d\d\b", "TIME", line)) for line in lines)
    return [re.sub(r" +", " ", line) for line in masked]


def test_a_plan_is_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    (words, says), *_ = [(words, says) for words, says in quoted(REFIT) if words[1] == "plan"]
    monkeypatch.chdir(ROOT)
    ended = coordinator(*words[1:])
    assert ended.returncode == 0, ended.stderr
    *lines, took = printed(ended.stdout)
    *expected, expected_took = says
    assert lines == expected
    assert without_times([took])[0].split()[:2] == without_times([expected_took])[0].split()[:2] == ["planned", "in"]


def test_the_run_of_the_page_has_such_refits() -> None:
    copy_examples()
    (up, nothing), (refits, says) = [(words, says) for words, says in quoted(REFIT) if words[1] in ("up", "refits")]
    assert nothing == []
    ended = coordinator(*up[1:])
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}{ended.stderr}"
    listed = coordinator(*refits[1:])
    assert listed.returncode == 0, listed.stderr
    assert without_times(printed(listed.stdout)) == without_times(says)


def test_the_replays_of_the_page_say_what_it_quotes() -> None:
    """Dots stand for what is left out."""
    copy_examples()
    for words, says in quoted(REPLAY):
        ended = coordinator(*words[1:])
        assert ended.returncode == 0, f"{ended.stdout[-2000:]}{ended.stderr}"
        if (begin := says.index("...")) == 0:
            continue
        lines = printed(ended.stdout)
        assert lines[:begin] == says[:begin]
        assert lines[-1:] == says[begin + 1 :]


def test_the_adapter_is_the_one_that_is_tested() -> None:
    example = (ROOT / "tests" / "unit" / "example_adapter.py").read_text()
    assert re.findall(r"```python\n(.*?)```", REFIT, re.DOTALL) == [example]
    assert len(example.splitlines()) < MOST_LINES


def test_the_asynchronous_run_of_the_page_has_its_metrics() -> None:
    copy_examples()
    ((up, nothing),) = [(words, says) for words, says in quoted(ASYNCHRONOUS) if words[1] == "up"]
    assert nothing == []
    short = ["grpo.max_num_steps=3", "grpo.num_prompts_per_step=16", "policy.train_micro_batch_size=64"]
    ended = coordinator(*up[1:], *short)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}{ended.stderr}"
    table = ASYNCHRONOUS.partition("## Metrics")[2].partition("##")[0]
    names = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)}
    assert len(names) == 11
    trained = [step.metrics for step in steps_of("results/arithmetic_async")][1:]
    assert all(names <= metrics.keys() for metrics in trained)
    assert [metrics["max_trajectory_age"] for metrics in trained] == [0, 1, 1], "an engine begins while a step trains"
