"""The value of a validation metric that ends a run: an observer asks for the end once it is reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tandem.config import Config
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.scheduler import Scheduler
from tandem.observe.run_folder.journal import StepRecord

if TYPE_CHECKING:
    from tandem.coordinator.processes.registry import ProcessRegistry


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

    def is_reached(self, records: Sequence[StepRecord]) -> bool:
        """Note, and tell, whether the last of these steps that was validated is good enough."""
        for record in [record for record in records if self._metric in record.metrics][-1:]:
            value = record.metrics[self._metric]
            if value >= self._threshold:
                self._why = (
                    f"{self._key}: step {record.step} has {self._metric} {value:g}, at least {self._threshold:g}: "
                    "the run ends"
                )
        return self._why is not None

    def committed(self, record: StepRecord) -> None:
        """Ask for the end of the run at once, if the step is good enough."""
        self.is_reached([record])
        self._ask_once()

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """Ask for the end of a run that was good enough when it was resumed."""
        self._ask_once()

    def _ask_once(self) -> None:
        if self._why is not None and not self._has_asked:
            self._has_asked = True
            self._ask(self._why)


def validation_stop(
    config: Config, earlier: Callable[[], Sequence[StepRecord]], ask: Callable[[str], None]
) -> list[ValidationStop]:
    """Return the observer that a configuration asks for, if it does.

    It looks at the `earlier` steps too: a run that has ended so does not go on when it is resumed, even if it did
    another step before it ended.
    """
    section = config.rollout_section if config.generates else None
    if section is None or section.stop_at_validation_metric is None or section.stop_at_validation_threshold is None:
        return []
    key = f"{config.algorithm}.stop_at_validation_metric"
    stop = ValidationStop(section.stop_at_validation_metric, section.stop_at_validation_threshold, key, ask)
    stop.is_reached(earlier())
    return [stop]
