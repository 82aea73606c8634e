"""Files of a newer NeMo-RL in whole runs: what is ignored, what its new keys do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common.messages import Purpose, SampleScored
from tandem.config import load_config
from tandem.observe.run_folder.journal import read_journal
from tandem.samples.recorded_shards import read_step
from tandem.samples.sample_files import FOLDER
from tests.harness.runs.running import coordinator, merged, steps_of, write_config

HEADING = "ignored:"
NOT_KNOWN = "is not known to this release: no effect"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scored_of(run: str, purpose: Purpose) -> list[SampleScored]:
    """Return the samples of a run's first step."""
    with read_journal(Path(run)) as journal:
        recorded = read_step(Path(run) / FOLDER, 1, journal.run_id, purpose)
    return [sample.scored for sample in recorded]


def test_unknown_keys_are_ignored_on_request_and_a_resumed_run_says_the_same() -> None:
    over = {"grpo": {"max_num_steps": 1, "quorum": 3}, "telemetry": {"enabled": True}}
    config = write_config(over)
    refused = coordinator("check", config)
    assert refused.returncode == 2
    assert refused.stderr.count("--newer") == 2
    checked = coordinator("check", config, "--newer")
    assert checked.returncode == 0, checked.stderr
    ignored = [f"  grpo.quorum (3) {NOT_KNOWN}", f'  telemetry ({{"enabled": true}}) {NOT_KNOWN}']
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
    unfit = coordinator("check", "--newer", config, "data.train_data_path=nowhere.jsonl")
    for failed in (slip, unfit):
        heading, *lines = failed.stdout.splitlines()
        assert (heading, sorted(lines)) == (HEADING, ignored), "what would be ignored, whatever else is wrong"
    assert unfit.returncode in (1, 2)
    assert "nowhere.jsonl" in unfit.stderr
    done = coordinator("up", config, "--newer")
    assert done.returncode == 0, done.stderr + done.stdout
    told = [f"note:{line[1:]}" for line in ignored]
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


JUDGE = """
from tandem.rollout.environments import Score

class Judge:
    '''Responses to problems of an even number are all worth one; to others, digits are worth something.'''

    def score(self, problem, response):
        if int(problem.question.split()[0]) % 2 == 0:
            return Score(reward=1.0, correct=True)
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=share, correct="1" in response)
"""


def test_a_run_ends_when_validation_is_good_enough_and_stays_ended() -> None:
    Path("judging.py").write_text(JUDGE)
    grpo = {
        "max_num_steps": 1000,
        "val_period": 2,
        "val_start_at": 4,
        "stop_at_validation_metric": "accuracy",
        "stop_at_validation_threshold": 0.05,
    }
    config = write_config({"env": {"mine": {"class": "judging.Judge"}}, "grpo": grpo})
    done = coordinator("up", config, "--unfinished-code", "75")
    assert done.returncode == 0, done.stderr + done.stdout
    steps = steps_of()
    assert [record.step for record in steps] == [1, 2, 3, 4], "nothing is trained after that"
    assert [record.step for record in steps if "val_accuracy" in record.metrics] == [4], "not before val_start_at"
    reached = steps[-1].metrics["val_accuracy"]
    assert f"grpo.stop_at_validation_metric: step 4 has val_accuracy {reached:g}, at least 0.05" in done.stdout
    assert "the model is in " in done.stdout, "it has finished, and is not told how to go on"
    assert "continue with" not in done.stdout
    assert Path("run/checkpoints/step_4/policy").is_dir()
    again = coordinator("up", config, "--resume")
    assert again.returncode == 0, again.stderr + again.stdout
    assert len(steps_of()) == 4, "it has ended"
    on = coordinator("up", config, "--resume", "grpo.stop_at_validation_threshold=2", "grpo.max_num_steps=5")
    assert on.returncode == 0, on.stderr + on.stdout
    assert len(steps_of()) == 5
    assert "val_accuracy" in steps_of()[-1].metrics, "the last step is validated"


def test_a_run_before_this_one_that_validates_well_enough_has_finished() -> None:
    Path("judging.py").write_text(JUDGE)
    stops = {"stop_at_validation_metric": "accuracy", "stop_at_validation_threshold": 0.05}
    over = {"env": {"mine": {"class": "judging.Judge"}}, "grpo": {"max_num_steps": 1000, "val_period": 2, **stops}}
    write_config({**over, "logger": {"log_dir": "before"}}, "before.yaml")
    later = {
        "prerequisite": "before.yaml",
        "policy": {"model_name": "before/checkpoints/step_2/policy", "new_model": None},
        "grpo": {"max_num_steps": 1, "val_period": 0, **dict.fromkeys(stops)},
        "checkpointing": {"metric_name": "reward"},
        "logger": {"log_dir": "after"},
    }
    config = write_config(merged(over, later))
    done = coordinator("up", config)
    assert done.returncode == 0, done.stderr + done.stdout
    assert [record.step for record in steps_of("before")] == [1, 2]
    assert [record.step for record in steps_of("after")] == [1], "which follows at once"
    with read_journal(Path("before")) as journal:
        assert [text for _, _, text in journal.events() if text.startswith("the run ")][-1] == "the run finished"
    again = coordinator("up", config, "--restart")
    assert again.returncode == 0, again.stderr + again.stdout
    assert "done before (2 steps in before), its checkpoint is used again" in again.stdout
    checked = coordinator("check", config)
    assert checked.returncode == 0, checked.stderr
    assert "prerequisite" not in checked.stderr
    other = coordinator("up", config, "--restart", "policy.model_name=before/checkpoints/step_8/policy")
    assert other.returncode == 1
    assert "step_8/policy' does not exist; its last checkpoint is before/checkpoints/step_2" in other.stderr


def test_several_validation_samples_of_a_problem_are_passed_by_any() -> None:
    Path("judging.py").write_text(JUDGE)
    grpo = {"max_num_steps": 1, "val_num_generations_per_prompt": 3}
    config = write_config({"env": {"mine": {"class": "judging.Judge"}}, "grpo": grpo})
    for folder, setting in (("drawn", "policy.generation.val_top_k=-1"), ("greedy", "policy.generation.val_top_k=1")):
        done = coordinator("up", config, setting, f"logger.log_dir={folder}", "policy.generation.top_k=-1")
        assert done.returncode == 0, done.stderr + done.stdout
        metrics = steps_of(folder)[-1].metrics
        samples = scored_of(folder, "validate")
        assert len(samples) == 8 * 3
        by_problem: dict[int, list[bool]] = {}
        for sample in samples:
            by_problem.setdefault(sample.group, []).append(sample.correct)
        assert all(len(each) == 3 for each in by_problem.values())
        assert metrics["val_pass_k"] == pytest.approx(sum(map(any, by_problem.values())) / 8)
        assert metrics["val_accuracy"] == pytest.approx(sum(sample.correct for sample in samples) / 24)
        responses: dict[int, set[str]] = {}
        for sample in samples:
            responses.setdefault(sample.group, set()).add(sample.response)
        assert all(len(each) == 1 for each in responses.values()) == (folder == "greedy")


def test_groups_of_equal_rewards_are_left_out_of_the_loss() -> None:
    Path("judging.py").write_text(JUDGE)
    grpo = {"max_num_steps": 1, "num_prompts_per_step": 8, "normalize_rewards": False, "val_period": 0}
    over = {
        "env": {"mine": {"class": "judging.Judge"}},
        "grpo": grpo,
        "policy": {"train_global_batch_size": 32},
        "checkpointing": {"metric_name": "reward"},
    }
    config = write_config(over)
    losses = {}
    for folder, setting in (("all", "false"), ("some", "true")):
        flag = f"grpo.zero_variance_prompt_filtering={setting}"
        done = coordinator("up", config, flag, f"logger.log_dir={folder}")
        assert done.returncode == 0, done.stderr + done.stdout
        losses[folder] = steps_of(folder)[-1].metrics
    samples = scored_of("some", "train")
    groups: dict[int, list[SampleScored]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    spread = {group for group, each in groups.items() if len({sample.reward for sample in each}) > 1}
    assert 0 < len(spread) < 8, "some of each"
    numerator = 0.0
    for each in groups.values():
        for sample in each:
            others = [other.reward for other in each if other is not sample]
            numerator += (sample.reward - sum(others) / 3) * sample.response_length
    counted = sum(sample.response_length for group in spread for sample in groups[group])
    total = sum(sample.response_length for sample in samples)
    assert losses["all"]["loss"] == pytest.approx(-numerator / total, abs=1e-6)
    assert losses["some"]["loss"] == pytest.approx(-numerator / counted, abs=1e-6)
    assert losses["some"]["groups_filtered"] == 8 - len(spread)
    assert losses["some"]["reward"] == losses["all"]["reward"], "metrics are of all samples"
    assert losses["some"]["num_valid_samples"] == 4 * len(spread)
    assert "groups_filtered" not in losses["all"]


def test_a_step_of_only_equal_rewards_teaches_nothing() -> None:
    Path("judging.py").write_text(JUDGE.replace("% 2 == 0", ">= 0"))
    over = {
        "env": {"mine": {"class": "judging.Judge"}},
        "grpo": {"max_num_steps": 2, "val_period": 0, "zero_variance_prompt_filtering": True},
        "checkpointing": {"metric_name": "reward"},
    }
    done = coordinator("up", write_config(over))
    assert done.returncode == 0, done.stderr + done.stdout
    for record in steps_of():
        assert record.metrics["groups_filtered"] == 4
        assert record.metrics["loss"] == 0
        assert record.metrics["grad_norm"] == 0
