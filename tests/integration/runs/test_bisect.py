"""Bisections of real small runs: a poisoned sample, a rate, a healthy run; and replays without some samples."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.observe.run_folder.journal import read_journal
from tandem.samples import recorded_shards
from tandem.samples.recorded_shards import read_samples
from tests.harness.runs.by_hand import undisturbed_run
from tests.harness.runs.running import Command, coordinator, steps_of, wait_until, weights_of

POISON = """
from tandem.rollout.environments import Score

class Poison:
    '''One response in the second step is worth a million; digits are worth something in all others.'''

    def __init__(self):
        self.scored = 0

    def score(self, problem, response):
        self.scored += 1
        correct = response.strip() == problem.answer
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=1e6 if self.scored == 23 else share, correct=correct)
"""
BROKEN: dict[str, Any] = {
    "grpo": {"max_num_steps": 5, "val_period": 0, "normalize_rewards": False},
    "env": {"poison": {"class": "poisoned.Poison"}},
    "checkpointing": {"metric_name": "reward"},
}

HEALTHY: dict[str, Any] = {
    "grpo": {"max_num_steps": 4},
    "policy": {"max_total_sequence_length": 64, "generation": {"max_new_tokens": 48}},
}
"""A model that was never trained writes until it happens to stop."""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a run of four steps, which tests copy."""
    folder = tmp_path_factory.mktemp("healthy")
    undisturbed_run(folder, HEALTHY)
    return folder


@pytest.fixture
def run(healthy: Path) -> str:
    """Copy that folder to the working directory; return the run's."""
    shutil.copytree(healthy, ".", dirs_exist_ok=True, symlinks=True)
    return "run"


def test_a_poisoned_sample_is_named_and_no_trial_is_done_twice() -> None:
    Path("poisoned.py").write_text(POISON)
    undisturbed_run(Path(), BROKEN)
    with read_journal(Path("run")) as journal:
        run_id = journal.run_id
    poisoned = [
        sample
        for step in range(1, 6)
        for sample in read_samples(Path("run"), step, run_id, "train")
        if sample.reward == 1e6
    ]
    assert len(poisoned) == 1, "what was done to the run"
    with Command("coordinator", "bisect", "run") as bisect:
        bisect.wait_for(r"trial 3: ")
        bisect.signal(signal.SIGKILL)
        assert bisect.wait() == -9
    earlier = Path("run-bisect/trials.jsonl").read_text().splitlines()[1:]
    assert len(earlier) >= 3
    done = coordinator("bisect", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    sample = poisoned[0]
    name = f"step {sample.step}, group {sample.group}, sample {sample.sample}"
    named = rf"{name} \(problem {re.escape(sample.problem_id)}, reward 1e\+06\)"
    shown = r"without it the trouble is gone, and without all other groups it is there \(trials [\d, ]+\)"
    sentence = rf"^cause of numbers out of proportion: {named}: {shown}$"
    assert re.search(sentence, done.stdout, re.MULTILINE), done.stdout
    table = [json.loads(line) for line in Path("run-bisect/trials.jsonl").read_text().splitlines()[1:]]
    assert [json.dumps(row) for row in table[: len(earlier)]] == [json.dumps(json.loads(line)) for line in earlier]
    keys = [row["key"] for row in table]
    assert len({*keys}) == len(keys), "none was done again"
    assert done.stdout.count(", done before: ") >= len(earlier)
    assert table[0]["change"] == "with nothing changed"
    assert table[0]["outcome"] == "trouble"
    again = coordinator("bisect", "run", "--json")
    end = json.loads(again.stdout)
    assert end["cause"]["cause"] == name
    assert len(end["trials"]) == len(keys), "nothing was left to do"


def test_a_rate_is_named(run: str) -> None:
    shutil.rmtree(run)
    undisturbed_run(Path(), {"grpo": {"max_num_steps": 6}, "policy": {"optimizer": {"kwargs": {"lr": 0.3}}}})
    before = {path: path.stat().st_mtime_ns for path in Path(run).rglob("*") if path.is_file()}
    done = coordinator("bisect", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "cause of learning rate too large: policy.optimizer.kwargs.lr, which is 0.3: with policy.optimizer.kwargs.lr="
        in done.stdout
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before, "the run is only read"


def test_nothing_is_looked_for_in_a_healthy_run(run: str) -> None:
    done = coordinator("bisect", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "run shows no trouble: nothing to look for\n"
    assert not Path("run-bisect").exists()


def test_a_trouble_given_by_hand_has_limits(run: str) -> None:
    entropy = steps_of(run)[-1].metrics["entropy"]
    done = coordinator("bisect", run, "--metric", "entropy", "--above", str(entropy / 2), "--max-trials", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "trial 1: replay with nothing changed: the trouble is there" in done.stdout
    assert "no cause is named: 2 trials are used up (--max-trials)" in done.stdout
    listed = json.loads(coordinator("runs", ".", "--json").stdout)
    assert [row["folder"] for row in listed["runs"]] == ["run"], "trials are not listed"
    wrong = coordinator("bisect", run, "--metric", "entropi", "--above", "1")
    assert wrong.returncode == 2
    assert wrong.stderr == "error: --metric entropi: run has no such metric; did you mean 'entropy'?\n"


def test_ctrl_c_ends_the_trial_and_says_how_to_continue(run: str) -> None:
    with Command("coordinator", "bisect", run, "--metric=loss", "--below=100") as bisect:
        bisect.wait_for(r"trouble: loss is below 100 in step 1")
        wait_until(lambda: Path("run-bisect/trials/1/output.txt").exists(), lambda: "the first trial")
        bisect.signal(signal.SIGINT)
        assert bisect.wait() == 130, bisect.output()
        assert "interrupted; continue with: coordinator bisect run --metric=loss --below=100.0" in bisect.output()
    assert len(Path("run-bisect/trials.jsonl").read_text().splitlines()) == 1, "the header"


# --- replays without some samples ------------------------------------------------------------------------------------


def write_rows(*rows: dict[str, Any]) -> str:
    Path("without.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "without.jsonl"


def test_a_replay_with_the_recorded_rewards_is_the_run_to_the_bit(run: str) -> None:
    rewards = [
        {"step": step, "group": scored.group, "sample": scored.sample, "reward": scored.reward}
        for step in range(1, 5)
        for scored in (sample.scored for sample in recorded_shards.read_step(Path(run, "samples"), step))
    ]
    replayed = coordinator("replay", run, "--without", write_rows(*rewards))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert weights_of("run-replay/checkpoints/step_4") == weights_of("run/checkpoints/step_4")


def test_a_replay_leaves_samples_out(run: str) -> None:
    rows = [{"step": 2, "group": 1}, {"step": 3, "group": 0, "sample": 2}]
    replayed = coordinator("replay", run, "--without", write_rows(*rows))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "weights differ from those of step 4 of run (those of step" not in replayed.stdout
    assert "as replay.without was changed" in replayed.stdout
    rewards = {
        step: [
            scored.reward
            for scored in (sample.scored for sample in recorded_shards.read_step(Path(run, "samples"), step))
            if not (step == 2 and scored.group == 1) and (step, scored.group, scored.sample) != (3, 0, 2)
        ]
        for step in range(1, 5)
    }
    theirs = {record.step: record.metrics for record in steps_of("run")}
    for record in steps_of("run-replay"):
        step = record.step
        assert record.metrics["reward"] == pytest.approx(sum(rewards[step]) / len(rewards[step]))
        assert (record.metrics["grad_norm"] == theirs[step]["grad_norm"]) == (step == 1)


@pytest.mark.parametrize(
    ("row", "code", "problem"),
    [
        ({"step": 9}, 2, "--without: without.jsonl names samples of step 9; replayed are steps 1 to 4"),
        ({"step": 2, "group": 7}, 1, "step 2 has no group 7 among its 16 samples"),
    ],
)
def test_samples_that_are_not_there_are_refused(row: dict[str, int], code: int, problem: str, run: str) -> None:
    replayed = coordinator("replay", run, "--without", write_rows(row))
    assert replayed.returncode == code, replayed.stdout + replayed.stderr
    assert problem in replayed.stderr
