"""What a diagnosis finds in a record, at its thresholds, and what it does not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from diagnosis_harness import SLOW_RANK, Metrics, config_of, evidence_of, found_in, refit, sample, steps_of, write_run

from tandem.common.errors import CommandFailed, DamagedCheckpoint, ServiceLost
from tandem.config import Config
from tandem.coordinator.cli import main
from tandem.coordinator.loop.run import record_outcome
from tandem.coordinator.scheduler.events import FinishRun
from tandem.observe.diagnosis import CHECKS, diagnose, format_diagnosis
from tandem.observe.diagnosis.evidence import SampleRow, gather
from tandem.observe.health import LOW_ENTROPY
from tandem.observe.run_folder.journal import ENDED
from tandem.observe.run_folder.journal_writer import Journal

ASYNCHRONOUS = {"grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 4}}}


def test_in_a_run_that_learns_nothing_is_found() -> None:
    assert found_in(evidence_of(*[{} for _ in range(20)])) == {}
    assert found_in(evidence_of()) == {}, "nor in one that has not begun to"


Case = tuple[list[Metrics], list[Metrics], Config]
"""Steps in which it is found, steps in which it is not yet, and the configuration."""
FOUND: dict[str, Case] = {
    "no learning rate": ([{"learning_rate": 0.0}] * 5, [{"learning_rate": 0.0}] * 4 + [{}] * 4, config_of()),
    "no gradient": ([{"grad_norm": 0.0}] * 5, [{"grad_norm": 0.0}] * 4 + [{}] * 4, config_of()),
    "equal rewards": (
        [{"reward_min": 1.0}] * 3,
        [{"reward_min": 1.0}] * 2,
        config_of(),
    ),
    "groups without spread": (
        [{}] * 2 + [{"groups_without_spread": 0.9}] * 2,
        [{}] * 2 + [{"groups_without_spread": 0.89}] * 2,
        config_of(),
    ),
    "truncated responses": (
        [{}] * 2 + [{"truncated_fraction": 0.5}] * 2,
        [{}] * 2 + [{"truncated_fraction": 0.49}] * 2,
        config_of(),
    ),
    "growing responses": (
        [{}] * 2 + [{"mean_generation_length": 80.0}] * 2,
        [{}] * 2 + [{"mean_generation_length": 79.0}] * 2,
        config_of(),
    ),
    "responses shrink": (
        [{}] * 2 + [{"mean_generation_length": 10.0}] * 2,
        [{}] * 2 + [{"mean_generation_length": 11.0}] * 2,
        config_of(),
    ),
    "low entropy": ([{}] * 2 + [{"entropy": 0.06}] * 2, [{}] * 2 + [{"entropy": 0.061}] * 2, config_of()),
    "engine and trainer disagree": (
        [{"token_mult_prob_error": 1.11}] * 5,
        [{"token_mult_prob_error": 1.09}] * 5,
        config_of(),
    ),
    "stale samples": (
        [{}] + [{"token_mult_prob_error": 1.11, "avg_trajectory_age": 2.0, "max_trajectory_age": 3.0}] * 5,
        [{}] + [{"token_mult_prob_error": 1.09, "avg_trajectory_age": 2.0, "max_trajectory_age": 3.0}] * 5,
        config_of(**ASYNCHRONOUS),
    ),
    "groups thrown away": ([{"groups_too_old": 4.0}] * 5, [{"groups_too_old": 3.0}] * 5, config_of(**ASYNCHRONOUS)),
    "waiting": ([{"engine_idle_s": 1.1}] * 5, [{"engine_idle_s": 0.9}] * 5, config_of(**ASYNCHRONOUS)),
    "slow trainer rank": (
        [{}] + [SLOW_RANK] * 3,
        [{}] + [SLOW_RANK | {"trainer_compute_max_s": 0.79}] * 3,
        config_of(),
    ),
    "failing environment": (
        [{"environment_failures": 11.0}] * 4,
        [{"environment_failures": 10.0}] * 4,
        config_of(),
    ),
    "reward without accuracy": (
        [{"val_accuracy": 0.5}] + [{}] + [{"val_accuracy": 0.39, "reward": 0.51}] * 2,
        [{"val_accuracy": 0.5}] + [{}] + [{"val_accuracy": 0.41, "reward": 0.51}] * 2,
        config_of(),
    ),
    "overfitting": (
        [{"val_loss": 1.0}] + [{}] + [{"val_loss": 1.1, "loss": 0.05}] * 2,
        [{"val_loss": 1.0}] + [{}] + [{"val_loss": 1.09, "loss": 0.05}] * 2,
        config_of("sft"),
    ),
    "learning rate too large": (
        [{}] * 2 + [{"learning_rate": 0.01, "grad_norm": 3.0}] * 2,
        [{}] * 2 + [{"learning_rate": 0.009, "grad_norm": 3.0}] * 2,
        config_of(),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_found_from_its_threshold_on(name: str) -> None:
    steps, not_yet, config = FOUND[name]
    found = found_in(evidence_of(*steps, config=config))
    assert [*found] == [name]
    assert found[name].look_at
    assert found[name].evidence
    assert name not in found_in(evidence_of(*not_yet, config=config))


def test_two_signs_tell_of_large_steps_without_a_high_learning_rate() -> None:
    one = [{}] * 2 + [{"approx_kl": 0.5}] * 2
    two = [{}] * 2 + [{"approx_kl": 0.5, "clip_fraction": 0.5}] * 2
    assert "learning rate too large" not in found_in(evidence_of(*one))
    assert found_in(evidence_of(*two))["learning rate too large"].certainty == "likely"


def test_over_a_data_set_a_loss_that_rises_is_enough() -> None:
    rising = [{"loss": 2.0}, {"loss": 2.2}, {"loss": 2.3}, {"loss": 2.4}]
    assert [*found_in(evidence_of(*rising, config=config_of("sft")))] == ["learning rate too large"]
    assert found_in(evidence_of(*rising)) == {}, "a loss of GRPO goes up and down"


def test_what_is_rewarded_says_what_equal_rewards_mean() -> None:
    nothing = {"reward": 0.0, "reward_min": 0.0, "reward_max": 0.0, "accuracy": 0.0}
    everything = {"reward": 1.0, "reward_min": 1.0, "reward_max": 1.0, "accuracy": 1.0}
    (never,) = found_in(evidence_of(*[nothing] * 6)).values()
    (solved,) = found_in(evidence_of(*[everything] * 6)).values()
    assert never.what.startswith("No response was ever rewarded")
    assert solved.what.startswith("Every response is right")


def test_weights_that_do_not_change_are_told_by_their_digests() -> None:
    same = tuple(refit(version, digest=7) for version in range(3))
    assert [*found_in(evidence_of({}, {}, refits=same))] == ["unchanged weights"]
    assert found_in(evidence_of({}, {}, refits=same[:2])) == {}
    sampled = tuple(msgspec.structs.replace(record, verify="sampled") for record in same)
    assert found_in(evidence_of({}, {}, refits=sampled)) == {}
    still = {"learning_rate": 0.0}
    assert "unchanged weights" not in found_in(evidence_of(still, still, refits=same)), "no step was taken"


def test_one_repair_is_possible_and_three_are_likely() -> None:
    harmed = [refit(version, quarantined={"rollout-1": "it does not hold version 1: a.weight"}) for version in range(4)]
    once, often = evidence_of({}, refits=(harmed[0],)), evidence_of({}, refits=tuple(harmed))
    assert found_in(once)["damaged weights"].certainty == "possible"
    assert found_in(often)["damaged weights"].certainty == "likely"
    assert found_in(often)["damaged weights"].evidence[-1] == "and 1 more"


def test_one_response_to_several_problems_is_a_habit() -> None:
    before = [sample(1, str(number), problem_id=str(number)) for number in range(4)]
    habit = [sample(9, "42", problem_id=str(number), reward=0.5) for number in range(3)]
    others = [sample(9, str(number)) for number in range(3)]
    (found,) = found_in(evidence_of({}, samples=(*before, *habit, *others))).values()
    assert found.name == "one answer to everything"
    assert "is rewarded for it" in found.what
    assert found_in(evidence_of({}, samples=(*before, *habit, *others, sample(9, "8")))) == {}
    assert found_in(evidence_of({}, samples=(*before, *habit[:2]))) == {}
    yes_or_no = [msgspec.structs.replace(row, reference_answer="42") for row in (*habit, others[0])]
    answers = [*yes_or_no, *(msgspec.structs.replace(row, reference_answer="43") for row in others[1:])]
    assert found_in(evidence_of({}, samples=(*before, *answers))) == {}, "four of six problems have that answer"


def test_few_problems_are_told_by_how_often_they_come() -> None:
    drawn = [sample(step, str(step * 9 + group), group=group) for step in range(4) for group in range(2)]
    few = [msgspec.structs.replace(row, problem_id=str(row.group)) for row in drawn]
    assert found_in(evidence_of({}, samples=tuple(few)))["repeated problems"].certainty == "possible"
    by_heart = {"accuracy": 0.9, "val_accuracy": 0.5}
    assert found_in(evidence_of(by_heart, samples=tuple(few)))["repeated problems"].certainty == "likely"
    assert found_in(evidence_of({}, samples=tuple(few[2:]))) == {}


def test_a_slow_engine_is_told_by_its_samples() -> None:
    def rows(factor: float) -> tuple[SampleRow, ...]:
        return tuple(
            sample(step, f"{step}{name}{i}", rollout=name, finished_at=seconds, problem_id=f"{step}{name}{i}", group=i)
            for step in range(4)
            for name, seconds in (("rollout-0", 1.0), ("rollout-1", factor))
            for i in range(2)
        )

    found = found_in(evidence_of({}, samples=rows(2.0)))
    assert [*found] == ["slow engine"]
    assert found["slow engine"].what.startswith("rollout-1 takes 2.0 times")
    assert found_in(evidence_of({}, samples=rows(1.9))) == {}


def test_a_run_that_goes_on_and_does_nothing_stands_still() -> None:
    assert [*found_in(evidence_of({}, {}, quiet_s=61.0))] == ["standstill"]
    assert found_in(evidence_of({}, {}, quiet_s=59.0)) == {}


def test_the_failures_of_an_environment_are_counted_by_what_they_say() -> None:
    said = [f"environment 'mine', problem 'p:{i}': ValueError: cannot read '{i}' (x.py:6, in score)" for i in range(3)]
    rows = [sample(1, text, failure=text, problem_id=text) for text in said]
    config = config_of(
        grpo={"num_prompts_per_step": 1, "num_generations_per_prompt": 4}, policy={"train_global_batch_size": 4}
    )
    found = found_in(
        evidence_of({"environment_failures": 3.0, "environment_timeouts": 2.0}, config=config, samples=tuple(rows))
    )
    failing = found["failing environment"]
    assert failing.certainty == "certain"
    assert "mostly because it took too long" in failing.what
    assert failing.evidence[1].startswith(
        "3 recorded samples: environment 'mine', problem …: ValueError: cannot read …"
    )


def test_what_follows_from_a_cause_comes_after_it() -> None:
    collapsed = {"entropy": LOW_ENTROPY / 2, "groups_without_spread": 1.0, "learning_rate": 5.0}
    found = diagnose(write_run({"learning_rate": 5.0}, *[collapsed] * 6, finish=FinishRun(outcome="finished"))).findings
    assert [(finding.name, finding.explained_by) for finding in found] == [
        ("learning rate too large", ""),
        ("lost processes", ""),
        ("low entropy", "learning rate too large"),
        ("groups without spread", "learning rate too large"),
    ]


def test_a_cause_explains_nothing_that_was_there_before_it() -> None:
    """Rewards were equal before the learning rate could have done anything."""
    flat = {"reward_min": 1.0, "learning_rate": 5.0}
    found = diagnose(write_run(flat, *[flat | {"entropy": 0.001}] * 6, finish=FinishRun(outcome="finished"))).findings
    explained = {finding.name: finding.explained_by for finding in found}
    assert explained["equal rewards"] == ""
    assert explained["low entropy"] == "learning rate too large"


def test_the_end_of_a_run_is_read_from_its_journal() -> None:
    error = ServiceLost("trainer-0", "training step 3", "killed by SIGKILL")
    folder = write_run({}, {}, finish=FinishRun(outcome="failed", error=error))
    Path("run/logs").mkdir()
    Path("run/logs/trainer-0.log").write_text("step 2\nOut of memory\ntrainer-0 leaves: the run was failed\n")
    found = diagnose(folder)
    assert [finding.name for finding in found.findings] == ["lost processes", "run failed"]
    assert found.findings[1].explained_by == "lost processes"
    assert found.findings[1].evidence == (str(error), "last in logs/trainer-0.log: Out of memory")
    assert "2 of 9 steps, failed" in found.course
    with Journal.open(folder) as journal:
        journal.record_event("coordinator", "it is resumed")
    assert gather(folder).ending is None
    with Journal.open(folder) as journal, pytest.raises(DamagedCheckpoint):
        record_outcome(journal, lambda: (_ for _ in ()).throw(DamagedCheckpoint("step_2 is damaged")))
    assert diagnose(folder).findings[0].name == "damaged checkpoint"


def test_a_run_without_an_end_was_killed_unless_it_goes_on() -> None:
    folder = write_run({}, {})
    assert "killed" in {finding.name for finding in diagnose(folder).findings}
    lock = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        found = diagnose(folder)
    finally:
        os.close(lock)
    assert "killed" not in {finding.name for finding in found.findings}
    assert "is going on" in found.course


@pytest.mark.parametrize("outcome", ["finished", "interrupted"])
def test_an_end_that_was_wanted_is_no_finding(outcome: Any) -> None:
    found = diagnose(write_run({}, {}, finish=FinishRun(outcome=outcome)))
    assert [finding.name for finding in found.findings] == ["lost processes"]
    assert found.findings[0].certainty == "possible"


def test_every_way_to_end_is_recognised() -> None:
    assert ENDED.fullmatch("the run finished")
    assert ENDED.fullmatch("the run was interrupted")
    error = CommandFailed("a", "b", "c\nd")
    failed = ENDED.fullmatch(f"the run failed (CommandFailed): {error}")
    assert failed is not None
    assert failed["why"] == "a failed while b: c\nd"
    assert not ENDED.fullmatch("the run finished early")


def test_the_command_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    write_run({}, finish=FinishRun(outcome="finished"))
    assert main(["diagnose", "run", "--json"]) == 0
    (found,) = msgspec.json.decode(capsys.readouterr().out)
    assert found["findings"][0]["name"] == "lost processes"
    assert found["not_looked_at"] == ["no samples are recorded"]
    assert main(["diagnose", "run", "run"]) == 0
    text = capsys.readouterr().out
    assert text == f"{format_diagnosis(diagnose(Path('run')))}\n\n{format_diagnosis(diagnose(Path('run')))}\n"
    assert "1. lost processes (possible)" in text
    assert main(["diagnose", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("error: nothing holds no run")


def test_a_journal_of_another_release_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Journal.create(Path("run"), b"{}", "grpo").close()
    assert main(["diagnose", "run"]) == 1
    assert capsys.readouterr().err.startswith("error: run cannot be diagnosed by another release than began it: ")


def test_every_check_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    missing = [check.cause for check in CHECKS if f"| {check.cause} |" not in page]
    assert missing == []


def test_a_rank_is_slow_if_it_is_nearly_always_the_slowest_and_costs_something() -> None:
    another = SLOW_RANK | {"slowest_trainer": 5.0}
    found = found_in(evidence_of({}, *[SLOW_RANK] * 3, another))["slow trainer rank"]
    assert found.what.startswith("trainer-3 takes 2.0 times")
    assert "in the median of the 3 of 4 steps" in found.evidence[0]
    assert "10% of all the time" not in found.evidence[1], (
        "of the step in which it was not the slowest nothing is saved"
    )
    assert found_in(evidence_of({}, *[SLOW_RANK] * 2, another)) == {}
    small = SLOW_RANK | {"trainer_compute_max_s": 0.2, "trainer_compute_median_s": 0.05}
    assert found_in(evidence_of({}, *[small] * 3)) == {}, "a step takes 2 s: it costs less than a tenth"
    stages = {"megatron_cfg": {"enabled": True, "pipeline_model_parallel_size": 2}, "optimizer": None}
    piped = config_of(policy=stages, cluster={"trainers": 4})
    assert (
        "unequal numbers of layers"
        in found_in(evidence_of({}, *[another] * 3, config=piped))["slow trainer rank"].look_at
    )


DAMAGE = {
    "DELETE FROM run": "it names no run",
    "DELETE FROM configs": "it has no configuration",
    "UPDATE configs SET json = 'text'": "it has no configuration",
    "UPDATE refits SET record = '{'": "truncated",
    "UPDATE refits SET record = '{}'": "`version`",
    "UPDATE metrics SET value = 'text'": "'text'",
}


@pytest.mark.parametrize("command", ["diagnose", "report"])
@pytest.mark.parametrize("statement", DAMAGE)
def test_of_a_damaged_record_one_line_is_said(statement: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run({}, {})
    with Journal.open(folder) as journal:
        journal.record_refit(refit(1))
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as file, file:
        file.execute(statement)
    assert main([command, "run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: run/journal.sqlite is damaged: ")
    assert DAMAGE[statement] in line


def test_of_a_run_that_died_before_its_first_step_it_is_said_and_numbers_that_are_none_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_run()
    assert main(["diagnose", "run"]) == 0
    assert "no step is done" in capsys.readouterr().out
    assert main(["report", "run"]) == 0
    assert capsys.readouterr().out.startswith("0 steps in 0 s; report.html")
    with Journal.open(folder) as journal:
        for record in steps_of([{}, {"loss": float("nan"), "reward": float("nan")}, {}]):
            journal.commit_step(record)
    assert main(["report", "run"]) == 0
    assert main(["diagnose", "run"]) == 0
