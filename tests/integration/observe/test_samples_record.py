"""What a run trained on is in its record, whatever happens to its rollouts and to the disk."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tandem.config import load_config
from tandem.samples.model_files import load_tokenizer
from tandem.samples.recorded_shards import steps
from tandem.samples.sample_files import files
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.record_harness import TWO, assert_recorded
from tests.harness.runs.running import (
    Command,
    coordinator,
    merged,
    process_of,
    processes_of,
    steps_of,
    wait_until,
    write_config,
)

JUDGE = """
from tandem.rollout.environments import Score

class Judge:
    def score(self, problem, response):
        components = {"has_one": float("1" in response), "begins_low": float(response[:1] in set("01234"))}
        return Score(components["has_one"], correct=components["has_one"] > 0, components=components)
"""
TALK = """
from tandem.rollout.environments import Score, Turn

class Talk:
    def step(self, problem, conversation):
        said = [message["content"] for message in conversation if message["role"] == "assistant"]
        reward = sum(map(len, said)) / 100
        return Score(reward, correct=False) if len(said) == 3 else Turn([{"role": "user", "content": "1+1"}], reward)
"""
# --- what is recorded ------------------------------------------------------------------------------------------------


def test_every_sample_that_was_trained_on_is_recorded_and_pandas_reads_it() -> None:
    config = write_config(TWO)
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    record = assert_recorded("run", config)
    tokenizer = load_tokenizer(load_config(config))
    for step, rows in record.items():
        assert [(row.scored.group, row.scored.sample) for row in rows] == [divmod(i, 4) for i in range(16)]
        assert {row.rollout for row in rows} == {"rollout-0", "rollout-1"}
        assert {row.scored.newest_version for row in rows} == {step - 1}
        for row in rows:
            token_ids = row.arrays.token_ids_T.tolist()
            length = row.scored.prompt_length
            assert row.prompt == tokenizer.decode(token_ids[:length], skip_special_tokens=False)
            assert row.scored.response == tokenizer.decode(token_ids[length:])
            assert row.question in row.prompt
            assert row.answer == str(eval(row.question))
    frame = pd.concat(pd.read_parquet(path) for path in sorted(Path("run/samples").glob("*.parquet")))
    assert len(frame) == 3 * 16
    means = frame.groupby("step")["reward"].mean()
    lengths = frame.groupby("step")["response_length"].mean()
    for done in steps_of():
        assert means[done.step] == pytest.approx(done.metrics["reward"])
        assert lengths[done.step] == pytest.approx(done.metrics["mean_generation_length"])
    assert frame.groupby(["step", "group"])["problem_id"].nunique().max() == 1


def test_what_dynamic_sampling_leaves_out_is_recorded_without_an_advantage() -> None:
    Path("judging.py").write_text(JUDGE)
    grpo = {"max_num_steps": 3, "use_dynamic_sampling": True, "batch_multiplier": 1.25}
    own = {"env": {"mine": {"class": "judging.Judge"}}, "grpo": grpo, "policy": {"train_global_batch_size": 8}}
    config = write_config(merged(TWO, own))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    record = assert_recorded("run", config)
    for step in steps_of():
        rows = record[step.step]
        assert len(rows) == 5 * 4 * step.metrics["dynamic_sampling_num_gen_batches"]
        assert sum(row.advantage is not None for row in rows) == 16
        assert all(set(row.scored.components) == {"has_one", "begins_low"} for row in rows)


def test_samples_of_several_turns_are_recorded_with_what_the_environment_said() -> None:
    Path("talking.py").write_text(TALK)
    own = {"env": {"mine": {"class": "talking.Talk"}}, "grpo": {"max_num_steps": 2, "max_rollout_turns": 3}}
    config = write_config(merged(TWO, own))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    rows = [row for rows in assert_recorded("run", config).values() for row in rows]
    longest = max(rows, key=lambda row: row.scored.num_turns)
    assert longest.scored.num_turns == 3
    assert longest.scored.response.count("\n1+1\n") == 2
    edges = np.flatnonzero(np.diff(longest.arrays.loss_mask_T.astype(int)))
    assert len(edges) == 5, "the prompt, and three responses with two replies between them"


def test_a_record_can_be_switched_off_and_bounded() -> None:
    config = write_config(merged(TWO, {"grpo": {"max_num_steps": 5}}))
    ended = coordinator("up", config, "logger.samples=off", "logger.log_dir=without")
    assert ended.returncode == 0, ended.stderr
    assert not Path("without/samples").exists()
    ended = coordinator("up", config, "logger.samples=all", "logger.log_dir=all")
    assert ended.returncode == 0, ended.stderr
    sizes = [file.path.stat().st_size for file in files(Path("all/samples"))]
    assert steps(Path("all/samples")) == [1, 2, 3, 4, 5]
    bound = 2.5 * sum(sizes) / 5
    ended = coordinator("up", config, f"logger.samples={bound / 1e9:.9f}", "logger.log_dir=bounded")
    assert ended.returncode == 0, ended.stderr
    assert steps(Path("bounded/samples")) == [4, 5], "whole steps, the newest"
    assert len(files(Path("bounded/samples"))) == 4
    bad = coordinator("up", config, "logger.samples=alll", "logger.log_dir=bad")
    assert bad.returncode != 0
    assert "logger.samples: expected all, off or a number greater than 0, got 'alll'" in bad.stderr


def test_a_folder_that_cannot_be_written_stops_nothing_and_is_said() -> None:
    config = write_config(TWO)
    Path("run").mkdir()
    Path("run/samples").write_text("no folder")
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    assert [step.step for step in steps_of()] == [1, 2, 3]
    said = sorted(line for line in ended.stdout.splitlines() if "missing in the record" in line)
    missing = "samples of step 1 are missing in the record: those of rollout-{}: none of the 8 samples was written"
    assert len(said) == 2, "each rollout once"
    for rollout in range(2):
        assert any(missing.format(rollout) in line for line in said), said
    assert Path("run/checkpoints/step_3").exists()


# --- who is killed ---------------------------------------------------------------------------------------------------


def test_a_killed_rollout_takes_no_sample_with_it_that_was_trained_on() -> None:
    config = write_config(merged(TWO, {"grpo": {"max_num_steps": 40}}))
    for score in (17, 161, 305):  # whose steps are those below or later: what was killed is scored again
        hold(score)
    with Command("coordinator", "up", config) as run:
        for step in (1, 8, 16):
            await_hold(run, f"step {step}/40")
            wait_until(lambda: len(processes_of(run, "rollout")) == 2, lambda: "two engines")
            process_of(run, "rollout", step % 2).send_signal(signal.SIGKILL)
            go_on()
        assert run.wait() == 0, run.output()
    assert "missing in the record" not in run.output()
    assert all(len(rows) == 16 for rows in assert_recorded("run", config).values())
