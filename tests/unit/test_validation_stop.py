"""The value of a validation metric that ends a run: which steps it looks at, and how often it asks."""

from __future__ import annotations

from tandem.config import Config, build_config
from tandem.coordinator.observers.finished_steps import validation_stop
from tandem.observe.run_folder.journal import StepRecord


def stopping_config(**over: float) -> Config:
    stops = {"stop_at_validation_metric": "accuracy", "stop_at_validation_threshold": 0.5, **over}
    return build_config(
        {
            "grpo": stops,
            "policy": {"model_name": "model"},
            "data": {"dataset_name": "gsm8k"},
            "env": {"exact_match": {}},
        }
    )


def steps(*accuracies: float | None) -> list[StepRecord]:
    """Return finished steps, with what the validated ones came to."""
    return [
        StepRecord(step=step, version=step, metrics={} if value is None else {"val_accuracy": value}, seconds={})
        for step, value in enumerate(accuracies, start=1)
    ]


def test_it_asks_once_and_as_soon_as_the_step_is_committed() -> None:
    asked: list[str] = []
    (stop,) = validation_stop(stopping_config(), list, asked.append)
    for record, count in zip(steps(None, 0.4, 0.5, 0.9), (0, 0, 1, 1), strict=True):
        stop.committed(record)
        assert len(asked) == count
    assert asked == ["grpo.stop_at_validation_metric: step 3 has val_accuracy 0.5, at least 0.5: the run ends"]


def test_a_run_has_ended_if_its_last_validation_was_good_enough() -> None:
    """An asynchronous run may train on a step that was begun meanwhile, and does not validate it."""
    for earlier, has_ended in (
        (steps(), False),
        (steps(None, None), False),
        (steps(0.4, 0.6), True),
        (steps(None, 0.6, None), True),
        (steps(0.6, 0.4), False),
    ):
        (stop,) = validation_stop(stopping_config(), lambda each=earlier: each, lambda why: None)  # type: ignore[misc]
        assert stop.is_reached([]) is has_ended, earlier


def test_a_run_without_such_a_value_has_no_observer() -> None:
    config = build_config(
        {"grpo": {}, "policy": {"model_name": "m"}, "data": {"dataset_name": "gsm8k"}, "env": {"exact_match": {}}}
    )
    assert validation_stop(config, list, lambda why: None) == []
