"""A bisection without processes: subsets, troubles of recorded runs, hypotheses, the table of trials."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from diagnosis_harness import RUNS, WELL, config_of, evidence_of, evidence_of_run, found_in

from tandem.common.errors import ConfigError, RunFolderError
from tandem.coordinator.algorithms.left_out import SampleEdit, read_edits, write_edits
from tandem.coordinator.bisecting.hypotheses import list_hypotheses
from tandem.coordinator.bisecting.recorded_groups import SampleFacts, list_old, list_partitions, rewards_by_answers
from tandem.coordinator.bisecting.search import RunBisection, TrialLimits
from tandem.coordinator.bisecting.subsets import divide, reduce
from tandem.coordinator.bisecting.trials import BisectionInterrupted, TrialRecord, TrialSpec, TrialTable
from tandem.coordinator.bisecting.troubles import RunTrouble, find_by_hand, find_troubles
from tandem.observe.diagnosis import _sort_findings
from tandem.observe.diagnosis.evidence import RunEvidence
from tandem.observe.run_folder.journal import StepRecord

# --- subsets ---------------------------------------------------------------------------------------------------------


def test_the_example_of_the_paper() -> None:
    """Zeller and Hildebrandt 2002, figure 5: of the changes 1 to 8, 1, 7 and 8 together fail."""
    asked: list[list[int]] = []

    def fails(changes: Sequence[int]) -> bool:
        asked.append([*changes])
        return {1, 7, 8} <= {*changes}

    assert reduce(range(1, 9), fails) == [1, 7, 8]
    assert asked[:2] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert asked[2:6] == [[1, 2], [3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize("cause", [0, 77, 127])
def test_a_single_cause_takes_two_trials_for_each_halving(cause: int) -> None:
    asked: list[int] = []

    def holds(units: Sequence[int]) -> bool:
        asked.append(len(units))
        return cause in units

    assert reduce(range(128), holds) == [cause]
    assert len(asked) <= 2 * 7


def test_without_a_small_part_it_gives_up_early() -> None:
    asked: list[int] = []

    def holds(units: Sequence[int]) -> bool:
        asked.append(len(units))
        return False

    assert reduce(range(64), holds, most_parts=4) == [*range(64)]
    assert len(asked) == 2 + 4 + 4


def test_parts_have_nearly_equal_sizes() -> None:
    assert [*divide("abcdefg", 3)] == [["a", "b"], ["c", "d"], ["e", "f", "g"]]


# --- troubles --------------------------------------------------------------------------------------------------------


def troubles_of(evidence: RunEvidence) -> list[RunTrouble]:
    return find_troubles(evidence, _sort_findings([*found_in(evidence).values()]))


@pytest.mark.parametrize("name", RUNS)
def test_those_of_real_runs(name: str) -> None:
    run = RUNS[name]
    evidence = evidence_of_run(run)
    troubles = troubles_of(evidence)
    if not run.cause:
        assert troubles == [], "nothing is looked for in a healthy run"
        return
    trouble = troubles[0]
    assert trouble.finding == run.cause
    values = [record.metrics[trouble.metric] for record in evidence.steps if record.step <= trouble.last_step]
    assert sum(map(trouble.holds, values)) == trouble.fewest
    assert trouble.holds(evidence.steps[trouble.last_step - 1].metrics[trouble.metric])
    assert not trouble.holds(WELL[trouble.metric])
    assert trouble.is_of_trainers == (run.cause == "learning rate too large")


def test_a_rate_a_hundred_times_too_high_shows_in_the_first_step() -> None:
    evidence = evidence_of({"approx_kl": 2.3, "learning_rate": 0.04}, *[{"approx_kl": 0.6, "learning_rate": 0.04}] * 5)
    collapsed = evidence_of(*({**record.metrics, "reward": 0.01} for record in evidence.steps), config=evidence.config)
    trouble = find_by_hand(collapsed, "approx_kl", 0.5, None, None)
    assert trouble is not None
    assert (trouble.first_step, trouble.last_step, trouble.fewest) == (1, 1, 1)
    assert trouble.text == "approx_kl is above 0.5 in step 1, where it is 2.3"
    assert find_by_hand(collapsed, "approx_kl", 5.0, None, None) is None


def judged(values: Sequence[float], *, is_over: bool = True) -> str:
    trouble = RunTrouble(finding="", text="", metric="approx_kl", above=0.5, fewest=2, first_step=1, last_step=4)
    steps = [StepRecord(step=n, version=n, metrics={"approx_kl": v}, seconds={}) for n, v in enumerate(values, 1)]
    return trouble.judge(steps, 1, 4, is_over=is_over)


def test_a_trial_is_judged_by_the_steps_that_it_has() -> None:
    assert judged([0.1, 0.6, 0.1, 0.7]) == "trouble"
    assert judged([0.1, 0.6, float("nan"), 0.1]) == "trouble"
    assert judged([0.1, 0.6, 0.1, 0.1]) == "well"
    assert judged([0.1, 0.1, 0.1, 0.1, 0.9, 0.9]) == "well", "steps after the last do not count"
    assert judged([0.1, 0.1], is_over=False) == "undecided"
    assert judged([0.6, 0.6], is_over=False) == "trouble", "what comes later changes nothing"
    assert judged([]) == "undecided"


def test_findings_that_follow_from_others_come_last_with_their_cause() -> None:
    run = RUNS["a rate 100 times too high"]
    records = [StepRecord(step=n, version=n, metrics=m, seconds={"total": 1.0}) for n, m in run.steps.items() if n]
    troubles = troubles_of(evidence_of(config=config_of(run.algorithm), steps=tuple(records)))
    assert [trouble.follows_from for trouble in troubles[:1]] == [""]
    assert {trouble.follows_from for trouble in troubles[1:]} == {"learning rate too large"}


# --- hypotheses ------------------------------------------------------------------------------------------------------


def trouble_of(finding: str, metric: str = "", *, is_certain: bool = True) -> RunTrouble:
    limit = 1.0 if metric else None
    return RunTrouble(
        finding=finding, text="", metric=metric, above=limit, first_step=1, last_step=1, is_certain=is_certain
    )


def test_a_high_rate_comes_before_samples_and_a_usual_one_after_them() -> None:
    config = config_of(policy={"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.04}}})
    certain = list_hypotheses(config, trouble_of("learning rate too large", "approx_kl"))
    assert [each.kind for each in certain] == ["replay", "samples"]
    assert certain[0].settings == {"policy.optimizer.kwargs.lr": 0.004}
    likely = list_hypotheses(config, trouble_of("learning rate too large", "approx_kl", is_certain=False))
    assert [each.kind for each in likely] == ["samples", "replay"]
    by_rewards = list_hypotheses(config, trouble_of("learning rate too large", "reward"))
    assert [each.kind for each in by_rewards] == ["rerun"], "replays have the rewards that were recorded"


def test_what_is_as_it_usually_is_is_no_hypothesis() -> None:
    settings = {"generation": {"max_new_tokens": 64, "top_p": 0.3, "temperature": 0.01}}
    hypotheses = list_hypotheses(config_of(policy=settings), trouble_of("engine and trainer disagree", "kl"))
    assert [(each.cause, each.was) for each in hypotheses][:2] == [
        ("policy.generation.temperature", "0.01"),
        ("policy.generation.top_p", "0.3"),
    ]
    causes = {each.cause for each in list_hypotheses(config_of(), trouble_of("equal rewards", "reward_std"))}
    assert causes == {"", "policy.generation.max_new_tokens"}


# --- recorded samples ------------------------------------------------------------------------------------------------


def fact(step: int, group: int, sample: int = 0, **over: Any) -> SampleFacts:
    fields: dict[str, Any] = {
        "step": step,
        "group": group,
        "sample": sample,
        "problem_id": "a.jsonl:1",
        "reference_answer": "12",
    }
    fields |= {"response": " = 12", "reward": 1.0, "failure": "", "rollout": "rollout-0", "oldest_version": step - 1}
    return SampleFacts(**fields | over)


def test_samples_are_left_out_by_engine_environment_and_data_set() -> None:
    facts = [
        fact(1, 0),
        fact(1, 1, problem_id="b.jsonl:7", rollout="rollout-1"),
        fact(1, 2, problem_id="c.jsonl:7"),
    ]
    partitions = list_partitions(facts, {"a.jsonl": "sums", "b.jsonl": "poems", "c.jsonl": "poems"})
    assert [{each.name: each.samples for each in partition} for partition in partitions] == [
        {"the samples of engine rollout-0": [facts[0], facts[2]], "the samples of engine rollout-1": [facts[1]]},
        {"the samples of environment sums": [facts[0]], "the samples of environment poems": facts[1:]},
        {f"the samples of data set {name}.jsonl": [each] for name, each in zip("abc", facts, strict=True)},
    ]
    assert list_partitions(facts[:1], {}) == [], "what all have in common is no difference"


def test_samples_are_left_out_beyond_an_age_the_oldest_first() -> None:
    facts = [fact(9, group, oldest_version=8 - group) for group in range(4)]
    assert [(each.name, len(each.samples)) for each in list_old(facts)] == [
        ("samples 3 steps old or older", 1),
        ("samples 2 steps old or older", 2),
        ("samples a step old or older", 3),
    ]


def test_rewards_by_the_answers_change_only_those_that_differ() -> None:
    right = [fact(1, group, problem_id=f"a.jsonl:{group}") for group in range(8)]
    facts = [
        *right,
        fact(1, 8, reward=0.0),
        fact(1, 9, response=" = 120"),
        fact(1, 10, response=" = 13", reward=0.0),
        fact(1, 11, reference_answer="", reward=0.5),
    ]
    assert rewards_by_answers(facts) == (
        SampleEdit(step=1, group=8, sample=0, reward=1.0),
        SampleEdit(step=1, group=9, sample=0, reward=0.0),
    )
    chance = [fact(1, group, reference_answer=str(group), response="0 1 2 3 4 5 6 7", reward=0) for group in range(8)]
    assert rewards_by_answers(chance) == (), "each holds the answer of any other problem, too"


# --- the table -------------------------------------------------------------------------------------------------------


def record_of(number: int, spec: TrialSpec, **over: Any) -> TrialRecord:
    fields: dict[str, Any] = {
        "number": number,
        "key": spec.key,
        "kind": spec.kind,
        "change": spec.change,
        "outcome": "well",
    }
    return TrialRecord(**fields | {"num_steps": 1, "seconds": 1.0} | over)


def test_a_table_outlives_a_torn_line_and_forgets_what_decided_nothing() -> None:
    specs = [TrialSpec(kind="replay", change=f"change {n}", settings={"a": n}, to_step=3) for n in range(3)]
    table = TrialTable(Path("run-bisect"), "id")
    table.append(record_of(1, specs[0]))
    table.append(record_of(2, specs[1], outcome="undecided"))
    path = Path("run-bisect/trials.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole + msgspec.json.encode(record_of(3, specs[2]))[:20])
    with pytest.raises(RunFolderError, match="run-bisect: another process is doing its trials"):
        TrialTable(Path("run-bisect"), "id")
    table.close()
    again = TrialTable(Path("run-bisect"), "id")
    assert [record.number for record in again.records] == [1, 2]
    assert again.find(specs[0].key) == record_of(1, specs[0])
    assert again.find(specs[1].key) is None, "it is done again"
    assert path.read_bytes() == whole
    again.close()
    with pytest.raises(RunFolderError, match="is of the run id, which was there before: --restart"):
        TrialTable(Path("run-bisect"), "another")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_a_trial_ends_the_search_as_one_within_it_does(number: signal.Signals) -> None:
    evidence = evidence_of_run(RUNS["responses of two tokens"])
    limits = TrialLimits(most_trials=9, most_s=60.0, trial_s=60.0)
    bisection = RunBisection(evidence, Path("trials"), limits, lambda text: signal.raise_signal(number))
    before = signal.signal(number, signal.default_int_handler)  # what `nohup` ignores is not heard
    try:
        with pytest.raises(BisectionInterrupted):
            bisection.search(troubles_of(evidence))
    finally:
        signal.signal(number, before)
        bisection.table.close()
    assert not list(Path("trials/trials").rglob("output.txt")), "no trial has begun"


def test_the_name_of_a_trial_is_what_it_does() -> None:
    spec = TrialSpec(kind="replay", change="in words", settings={"b": 1, "a": 2}, to_step=3)
    assert spec.key == msgspec.structs.replace(spec, change="in others", settings={"a": 2, "b": 1}).key
    assert spec.key != msgspec.structs.replace(spec, edits=(SampleEdit(step=1),)).key
    assert spec.key != msgspec.structs.replace(spec, to_step=4).key


# --- files of samples to leave out -----------------------------------------------------------------------------------


def test_edits_are_read_as_they_were_written() -> None:
    edits = [SampleEdit(step=3, group=0, sample=5), SampleEdit(step=4, group=1), SampleEdit(step=5, reward=-0.5)]
    write_edits(Path("without.jsonl"), edits)
    assert Path("without.jsonl").read_text().splitlines()[0] == '{"step":3,"group":0,"sample":5}'
    assert read_edits("without.jsonl") == edits


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"step": 0}', "line 1: Expected `int` >= 1"),
        ('{"step": 1}\n{"step": 1, "sampel": 2}', "line 2: Object contains unknown field `sampel`"),
        ('{"step": 1, "sample": 2}', "line 1: a sample needs its group"),
        ("\n", "names no sample"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(text: str, problem: str) -> None:
    Path("without.jsonl").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_edits("without.jsonl")
    assert str(raised.value).startswith("--without: without.jsonl")
    assert problem in str(raised.value)
