"""What `coordinator diagnose` calls slow: a process beside the others, not a machine that became busy."""

from __future__ import annotations

from typing import Any

import pytest
from diagnosis_harness import SLOW_RANK, Metrics, config_of, evidence_of, found_in, sample, steps_of

from tandem.common.messages import MemoryUse, Trained
from tandem.coordinator.loop.recorder import StepMetrics
from tandem.observe.run_folder.journal import StepRecord

CALM, BUSY = range(1, 7), range(7, 13)


def rows(seconds: dict[str, float]) -> tuple[Any, ...]:
    """Return samples of engines that take a second each, and from step 7 on these."""
    return tuple(
        sample(
            *(step, f"{step}{i}"),
            problem_id=f"{step}{i}",
            group=i,
            rollout=rollout,
            finished_at=later if step in BUSY else 1.0,
        )
        for step in (*CALM, *BUSY)
        for rollout, later in seconds.items()
        for i in range(2)
    )


def trained_in(seconds: float, *, queued: float = 0.0) -> tuple[StepRecord, ...]:
    """Return steps whose one trainer takes 0.1 s each, and from step 7 on these, of which it waits a share."""
    waits: Metrics = {"trainer_queued_per_s": queued} if queued else {}
    changed: list[Metrics] = [{} if step in CALM else waits for step in (*CALM, *BUSY)]
    return tuple(
        StepRecord(
            step=record.step,
            version=record.version,
            metrics=record.metrics,
            seconds={"total": 2.0, "policy_training": seconds if record.step in BUSY else 0.1},
        )
        for record in steps_of(changed)
    )


def test_a_machine_that_became_busy_slows_everything_and_nothing_is_found() -> None:
    busy = evidence_of(steps=trained_in(0.25), samples=rows({"rollout-0": 3.0, "rollout-1": 2.8}))
    assert found_in(busy) == {}


def test_an_engine_that_became_slow_beside_a_trainer_that_did_not_is_named() -> None:
    evidence = evidence_of(steps=trained_in(0.1), samples=rows({"rollout-0": 3.0}))
    (found,) = found_in(evidence).values()
    assert (found.name, found.certainty, found.since) == ("became slow", "likely", 7)
    assert found.evidence[0].endswith("; other processes took 1 times as long from then on")


def test_an_engine_that_became_much_slower_than_the_busy_machine_explains_is_named() -> None:
    evidence = evidence_of(steps=trained_in(0.2), samples=rows({"rollout-0": 6.0, "rollout-1": 2.0}))
    assert found_in(evidence)["became slow"].what.startswith("rollout-0 became slow in step 7")


def test_both_engines_that_became_slow_beside_their_trainer_are_named() -> None:
    evidence = evidence_of(steps=trained_in(0.1), samples=rows({"rollout-0": 3.0, "rollout-1": 3.0}))
    (found,) = found_in(evidence).values()
    assert [line.partition(":")[0] for line in found.evidence] == ["rollout-0", "rollout-1"]


def test_a_trainer_that_waits_for_a_free_processor_has_not_become_slow_itself() -> None:
    """SFT has no other process to compare it with."""
    config = config_of("sft")
    assert found_in(evidence_of(config=config, steps=trained_in(0.5, queued=0.8))) == {}
    (found,) = found_in(evidence_of(config=config, steps=trained_in(0.5, queued=0.1))).values()
    assert (found.name, found.certainty) == ("became slow", "likely")


def test_slowness_that_nothing_can_tell_from_a_busy_machine_is_only_possible() -> None:
    (found,) = found_in(evidence_of(config=config_of("sft"), steps=trained_in(0.5))).values()
    assert found.certainty == "possible"
    assert found.evidence[-1] == "nothing in the record tells it from a machine that became busy"


def test_ranks_that_all_became_slow_on_a_busy_machine_are_not_named() -> None:
    well = SLOW_RANK | {"slowest_trainer": 1.0, "trainer_compute_max_s": 0.4, "trainer_compute_median_s": 0.2}
    busy = SLOW_RANK | {"slowest_trainer": 3.0, "trainer_compute_max_s": 1.6, "trainer_compute_median_s": 0.9}
    assert "became slow" not in found_in(evidence_of(*[well] * 6, *[busy] * 5))


def trained(compute_s: float, queued_s: float) -> Trained:
    use = MemoryUse(peak=0, held=0)
    return Trained(
        **{"command_id": 1, "step": 1, "version": 1, "metrics": {}, "seconds": {}, "has_update": True, "memory": use},
        compute_s=compute_s,
        waited_s=0.0,
        queued_s=queued_s,
    )


@pytest.mark.parametrize(
    ("queued_s", "compute_s", "share"), [(1.0, 4.0, 0.25), (0.0, 4.0, None), (1e9, 1e-300, 1.0), (1.0, 0.0, None)]
)
def test_the_share_of_its_time_that_a_rank_waits_for_a_processor_is_a_metric(
    queued_s: float, compute_s: float, share: float | None
) -> None:
    step = StepMetrics()
    step.trained("trainer-0", trained(compute_s, queued_s))
    step.breakdown({"total": 1.0})
    assert step.metrics.get("trainer_queued_per_s") == share
