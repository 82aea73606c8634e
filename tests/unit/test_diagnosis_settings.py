"""Settings, rewards and environments that break a run: what a diagnosis finds of them, at its thresholds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from diagnosis_harness import Metrics, config_of, evidence_of, found_in, sample

from tandem.config import Config
from tandem.observe.diagnosis import _sort_findings
from tandem.observe.diagnosis.evidence import SampleRow

NARROW = config_of(loss_fn={"ratio_clip_min": 0.02, "ratio_clip_max": 0.02})
PENALTY = config_of(loss_fn={"reference_policy_kl_penalty": 5.0})
COLD = config_of(policy={"generation": {"max_new_tokens": 64, "temperature": 0.3}})
OTHER = config_of(policy={"tokenizer": {"name": "another"}})
FOUND: dict[str, tuple[Metrics, Metrics, Config]] = {
    "learning rate too small": ({"learning_rate": 9e-10}, {"learning_rate": 1.1e-9}, config_of()),
    "clip range too narrow": ({"clip_fraction": 0.1}, {"clip_fraction": 0.09}, NARROW),
    "KL penalty too large": ({"kl": 0.1}, {"kl": 0.09}, PENALTY),
    "low temperature": ({"groups_without_spread": 0.75}, {"groups_without_spread": 0.7}, COLD),
    "another tokenizer": ({"accuracy": 0.15}, {"accuracy": 0.16}, OTHER),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_found_from_its_threshold_on(name: str) -> None:
    broken, well, config = FOUND[name]
    assert [*found_in(evidence_of(*[broken] * 4, config=config))] == [name]
    assert found_in(evidence_of(*[well] * 4, config=config)) == {}
    assert found_in(evidence_of(*[broken] * 4)).keys() <= {"learning rate too small"}, "it is the setting that is wrong"


def test_a_small_rate_is_judged_by_what_a_model_of_this_size_bears() -> None:
    low: list[Metrics] = [{"learning_rate": 1e-8}] * 4
    assert found_in(evidence_of(*low)) == {}
    assert found_in(evidence_of(*low, most_learning_rate=1e-3))["learning rate too small"].certainty == "likely"


def answered(reward: dict[bool, float], right: int = 4) -> tuple[SampleRow, ...]:
    """Return samples of three steps, of which so many of ten are right, and what that is worth."""
    return tuple(
        sample(
            step,
            f" = {number + (number >= right)}.",
            reference_answer=str(number),
            problem_id=f"{step} {number}",
            group=number,
            reward=reward[number < right],
        )
        for step in (1, 2, 3)
        for number in range(10)
    )


def test_rewards_are_judged_by_the_reference_answers() -> None:
    assert found_in(evidence_of({}, samples=answered({True: 1.0, False: 0.0}))) == {}
    against = found_in(evidence_of({}, samples=answered({True: 0.0, False: 1.0})))
    assert [*against] == ["reward against the answers"]
    unseen = found_in(evidence_of({}, samples=answered({True: 0.0, False: 0.0})))
    assert [*unseen] == ["right answers unrewarded"]
    assert found_in(evidence_of({}, samples=answered({True: 0.0, False: 0.0}, right=0))) == {}, "none is right"
    unknown = [msgspec.structs.replace(row, reference_answer="") for row in answered({True: 0.0, False: 1.0})]
    assert found_in(evidence_of({}, samples=tuple(unknown))) == {}


def test_a_stop_string_before_the_answer_is_the_cause_of_what_follows() -> None:
    nothing: Metrics = {"reward": 0.0, "reward_min": 0.0, "reward_max": 0.0, "accuracy": 0.0}
    rows = tuple(sample(1, "so =", problem_id=str(number), group=number) for number in range(4))
    config = config_of(policy={"generation": {"max_new_tokens": 64, "stop_strings": ["="]}})
    found = _sort_findings([*found_in(evidence_of(*[nothing] * 5, config=config, samples=rows)).values()])
    assert found[0].name == "responses stop too early"
    assert {each.explained_by for each in found[1:]} == {"responses stop too early"}
    assert "responses stop too early" not in found_in(evidence_of(*[nothing] * 5, samples=rows))


def test_samples_that_wait_to_be_scored_tell_of_a_slow_environment() -> None:
    def rows(wait: float, **over: Any) -> tuple[SampleRow, ...]:
        return tuple(
            sample(step, f"{step} {i}", problem_id=f"{step} {i}", group=i, finished_at=0.1 + wait * i / 3, **over)
            for step in range(1, 5)
            for i in range(4)
        )

    found = found_in(evidence_of(*[{}] * 4, samples=rows(1.0)))
    assert [*found] == ["slow environment"]
    assert found_in(evidence_of(*[{}] * 4, samples=rows(0.9))) == {}, "steps take two seconds"
    places = config_of(policy={"generation": {"max_new_tokens": 64, "transformers_cfg": {"num_slots": 3}}})
    assert found_in(evidence_of(*[{}] * 4, config=places, samples=rows(1.0))) == {}, "they may wait for the engine"


def test_problems_that_are_solved_at_the_start_are_the_cause_of_low_entropy() -> None:
    solved: Metrics = {"accuracy": 0.99, "entropy": 0.005, "groups_without_spread": 1.0}
    found = _sort_findings([*found_in(evidence_of(*[solved] * 6)).values()])
    assert [(each.name, each.explained_by) for each in found] == [
        ("groups without spread", ""),
        ("low entropy", "groups without spread"),
    ]
    assert "too easy" in found[0].what
    unsolved = _sort_findings([*found_in(evidence_of(*[solved | {"accuracy": 0.4}] * 6)).values()])
    assert unsolved[0].name == "low entropy"
