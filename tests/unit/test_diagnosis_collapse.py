"""Which cause `coordinator diagnose` names first: of a collapse within a few steps, of slowness, of no progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from diagnosis_harness import SLOW_RANK, Metrics, config_of, evidence_of, found_in, sample, write_run

from tandem.config import Config
from tandem.observe.diagnosis import _sort_findings
from tandem.observe.diagnosis.evidence import change_point
from tandem.observe.health import LowStart, no_progress
from tandem.observe.report.report import format_report, write_report

DESTROYED = {
    "reward": 0.0,
    "accuracy": 0.0,
    "entropy": 3.0,
    "truncated_fraction": 1.0,
    "mean_generation_length": 64.0,
    "reward_max": 0.0,
    "groups_without_spread": 1.0,
    "learning_rate": 4e-2,
}
COLLAPSE: list[Metrics] = [
    {"learning_rate": 4e-2, "truncated_fraction": 0.0, "mean_generation_length": 8.0},
    DESTROYED | {"approx_kl": 4.0},
    *[DESTROYED] * 10,
]
"""A learning rate a hundred times too high: after one step every response is cut off."""


def test_a_rate_that_destroys_the_policy_in_one_step_is_the_first_cause_and_truncation_follows_from_it() -> None:
    found = _sort_findings([*found_in(evidence_of(*COLLAPSE)).values()])
    assert found[0].name == "learning rate too large"
    assert {finding.explained_by for finding in found[1:]} == {"learning rate too large"}
    assert {"truncated responses", "equal rewards"} <= {finding.name for finding in found}
    kl, entropy, reward = found[0].evidence[1:]
    assert kl == "the policy moved by 4 nats a token within a step in step 2 (approx_kl; 0.5 is a sign)"
    assert entropy.startswith("entropy went from 0.6 to 3 in step 2")
    assert reward.startswith("reward went from 0.4 to 0 in step 2")


def test_what_is_said_of_truncation_agrees_with_its_figures() -> None:
    truncated = found_in(evidence_of(*COLLAPSE))["truncated responses"]
    assert "truncated_fraction went from 0 to 1 in step 2; 0.5 is the threshold" in truncated.evidence
    assert truncated.since == 2
    assert "from the start" not in truncated.what


def test_a_rate_is_judged_by_what_a_model_of_this_size_bears() -> None:
    steps: list[Metrics] = [{}, *[{"learning_rate": 2e-3, "approx_kl": 0.6}] * 5]
    assert "learning rate too large" not in found_in(evidence_of(*steps))
    assert found_in(evidence_of(*steps, most_learning_rate=1e-3))["learning rate too large"].certainty == "certain"


def test_entropy_that_falls_over_a_data_set_is_no_sign() -> None:
    steps: list[Metrics] = [{"loss": 3.0, "entropy": 2.8}, *[{"loss": 0.1, "entropy": 0.2}] * 6]
    assert found_in(evidence_of(*steps, config=config_of("sft"))) == {}


def test_a_change_point_is_where_the_means_change() -> None:
    values = [1.0, 1.1, 0.9, 5.0, 5.2, 4.9, 5.1]
    found = change_point("x", [*enumerate(values, 1)])
    assert found is not None
    assert (found.step, round(found.before, 6), round(found.after, 6)) == (4, 1.0, 5.05)
    assert change_point("x", [(1, 1.0), (2, 2.0), (3, 2.0)]) is None, "too few"
    assert change_point("x", [*enumerate([*values, float("inf")], 1)]) is None


def test_an_engine_that_became_slow_and_stays_so_is_named_with_the_step() -> None:
    def rows(*slow: int) -> tuple[Any, ...]:
        return tuple(
            sample(step, f"{step}{i}", problem_id=f"{step}{i}", group=i, finished_at=2.0 if step in slow else 1.0)
            for step in range(1, 13)
            for i in range(2)
        )

    (found,) = found_in(evidence_of({}, samples=rows(*range(7, 13)))).values()
    assert (found.name, found.since) == ("became slow", 7)
    assert found.what == "rollout-0 became slow in step 7, and stayed so."
    assert found_in(evidence_of({}, samples=rows(7, 8, 9))) == {}, "it recovered"
    assert found_in(evidence_of({}, samples=rows(11, 12))) == {}, "too few steps to tell"
    assert found_in(evidence_of({}, samples=rows(*range(1, 13)))) == {}, "it always was"


def test_a_rank_that_became_slow_and_stays_so_is_named_with_the_step() -> None:
    well = SLOW_RANK | {"slowest_trainer": 1.0, "trainer_compute_max_s": 0.4}
    (found,) = found_in(evidence_of(*[well] * 6, *[SLOW_RANK | {"slowest_trainer": 3.0}] * 5)).values()
    assert (found.name, found.since) == ("became slow", 7)
    assert found.what.startswith("trainer-3 ")


def test_a_start_near_zero_asks_for_more_sft_and_accuracy_that_does_not_move_is_said() -> None:
    said = no_progress([(0, 0.02), (50, 0.04), (100, 0.06)])
    assert said is not None
    assert said.startswith("held-out accuracy was 2.0% in step 0, and 6.0% in step 100: ")
    assert said.endswith("more SFT first")
    flat = no_progress([(0, 0.4), (50, 0.41), (100, 0.405)])
    assert flat is not None
    assert flat.endswith("it hardly moved")
    assert no_progress([(0, 0.4), (100, 0.43)]) is None
    fallen = no_progress([(0, 0.59), (12, 0.6), (24, 0.0)])
    assert fallen == "held-out accuracy was 59.0% in step 0, and 0.0% in step 24, 60.0% at best: it fell"
    risen = no_progress([(0, 0.59), (12, 0.9), (24, 0.0)])
    assert risen == "held-out accuracy was 59.0% in step 0, and 0.0% in step 24, 90.0% at best: it fell"
    assert (no_progress([(0, 0.99), (24, 0.1)]) or "").endswith("it fell"), "also where nothing was left to gain"
    assert no_progress([(0, 0.04), (100, 0.16)]) is None
    assert no_progress([(0, 0.02), (19, 0.02)]) is None, "too few steps to tell"
    assert no_progress([(0, 0.98), (100, 0.98)]) is None, "there was nothing to gain"
    assert no_progress([]) is None


def test_a_start_near_zero_is_said_while_the_run_goes_on_once_and_not_before_it_has_had_its_time() -> None:
    course = [(0, 0.02), (10, 0.03), (20, 0.05), (30, 0.06)]
    history = [(step, {"val_accuracy": value, "reward": 0.1}) for step, value in course]
    going = LowStart([])
    said = [going.warning(*each) for each in history]
    assert [line is not None for line in said] == [False, False, True, False]
    assert said[2] == (
        "warning: held-out accuracy was 2.0% in step 0, and 5.0% in step 20: the model could hardly do the task to "
        "begin with, so that nearly no sample was rewarded; more SFT first"
    )
    assert LowStart(history[:3]).warning(*history[3]) is None, "the run that is resumed has said it"
    assert LowStart(history[:2]).warning(*history[2]) == said[2]
    assert LowStart(history[:2]).warning(20, {"val_accuracy": 0.1}) is None, "it learns"
    assert LowStart(history[:2]).warning(20, {"reward": 0.1}) is None


def of_validations(*values: float) -> list[Metrics]:
    return [{"val_accuracy": values[number // 15]} if number % 15 == 0 else {} for number in range(15 * len(values))]


def test_a_fall_is_called_one_and_the_loss_that_stands_out_is_named() -> None:
    steps = of_validations(0.59, 0.3, 0.0)
    steps = [{**step, "loss": -8304.0 if number == 20 else 0.01} for number, step in enumerate(steps, 1)]
    found = found_in(evidence_of(*steps))["no progress"]
    assert found.what == "The run got worse: held-out accuracy fell."
    assert found.evidence[0].endswith("it fell")
    assert found.evidence[1] == "the loss was -8,304 in step 20, and 0.01 in the median"


def test_a_streak_without_a_metric_that_its_evidence_names_is_none() -> None:
    steps = evidence_of(*[{"grad_norm": 0.0}] * 8).steps
    bare = tuple(msgspec.structs.replace(step, metrics={"grad_norm": 0.0}) for step in steps)
    assert evidence_of({}, steps=bare).streak("grad_norm") is None


def test_no_progress_is_said_by_diagnose_and_by_the_report_that_up_ends_with() -> None:
    steps = of_validations(0.02, 0.03, 0.06)
    found = found_in(evidence_of(*steps))
    assert [*found] == ["no progress"]
    assert "more SFT first" in found["no progress"].evidence[0]
    folder = write_run(*steps)
    said = format_report(write_report([folder], Path("out"), is_brief=True), Path("out"))
    assert "warning: held-out accuracy was 2.0% in step 1, and 6.0% in step 31" in said


def test_no_progress_follows_from_a_learning_rate_of_zero() -> None:
    still: list[Metrics] = [{**metrics, "learning_rate": 0.0} for metrics in of_validations(0.3, 0.3, 0.3)]
    config: Config = config_of()
    found = _sort_findings([*found_in(evidence_of(*still, config=config)).values()])
    assert [(finding.name, finding.explained_by) for finding in found] == [
        ("no learning rate", ""),
        ("no progress", "no learning rate"),
    ]
