"""The value of a validation metric that ends a run: an observer asks for the end once it is reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.config import Config
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.processes.registry import Registry
from tandem.coordinator.scheduler import Scheduler
from tandem.observe.run_folder.journal import StepRecord


class ValidationStop(Observer):
    """A limit that a metric of validation reaches."""

    def __init__(self, metric: str, threshold: float, key: str, ask: Callable[[str], None]) -> None:
        """`ask` asks for the end of the run, and takes the reason; `key` is the metric's key, for that reason."""
        self._metric = metric
        self._threshold = threshold
        self._key = key
        self._ask = ask
        self._why: str | None = None
        self._has_asked = False

    def committed(self, record: StepRecord) -> None:
        """Note whether the step was validated, and well enough."""
        value = record.metrics.get(self._metric)
        if value is not None and value >= self._threshold:
            self._why = (
                f"{self._key}: step {record.step} has {self._metric} {value:g}, at least {self._threshold:g}: "
                "the run ends"
            )

    def show(self, scheduler: Scheduler, registry: Registry) -> None:
        """Ask once for the end of the run, if the value is reached."""
        if self._why is not None and not self._has_asked:
            self._has_asked = True
            self._ask(self._why)


def validation_stop(
    config: Config, earlier: Callable[[], Sequence[StepRecord]], ask: Callable[[str], None]
) -> list[Observer]:
    """Return the observer that a configuration asks for, if it does.

    It looks at the last of the `earlier` steps too: a run that has ended so does not go on when it is resumed.
    """
    section = config.rollout_section if config.generates else None
    if section is None or section.stop_at_validation_metric is None or section.stop_at_validation_threshold is None:
        return []
    key = f"{config.algorithm}.stop_at_validation_metric"
    stop = ValidationStop(section.stop_at_validation_metric, section.stop_at_validation_threshold, key, ask)
    for record in earlier()[-1:]:
        stop.committed(record)
    return [stop]
