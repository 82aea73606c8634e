"""Observers: they see a run's events, and have no influence on it.

One exception: an observer may ask for the run's end, as Ctrl-C does. The loop calls one `Observers` and knows none of
them by name. An observer's own resource, such as a file, must never
stop the run: if it fails, the observer gives it up and says so in a line of news.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tandem.common.messages import AnyCommand, Failed, Reply
from tandem.coordinator.processes.registry import Registry
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import Event
from tandem.observe.run_folder.journal import RefitRecord, StepRecord


class Observer:
    """Base of observers, with a method for each kind of event; only those that are overridden are called."""

    def sent(self, process: str, command: AnyCommand, now: float) -> None:
        """Handle a request to a process; `now` is by the monotonic clock."""

    def answered(self, process: str, reply: Reply | Failed, now: float) -> None:
        """Handle a reply."""

    def handled(self, event: Event, scheduler: Scheduler) -> None:
        """Handle an event that the scheduler has handled."""

    def noted(self, text: str) -> None:
        """Handle a line of the console."""

    def sample_failed(self) -> None:
        """Handle a sample on which an environment failed."""

    def discarded(self, num_groups: int) -> None:
        """Handle groups that are not trained on."""

    def refitted(self, record: RefitRecord) -> None:
        """Handle a version that has reached engines."""

    def lost(self, process: str) -> None:
        """Handle the loss of a process."""

    def replaced(self, count: int) -> None:
        """Handle replacements of processes; trainers that restart together are one."""

    def committed(self, record: StepRecord) -> None:
        """Handle a finished step."""

    def show(self, scheduler: Scheduler, registry: Registry) -> None:
        """Bring what the observer shows up to date. Called several times a second."""

    def take_news(self) -> list[str]:
        """Return lines for the console, each once."""
        return []

    def close(self) -> None:
        """Close the observer's resources."""


class Observers(Observer):
    """The observers of a run as one, called in the order in which they are given and closed in reverse."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._sent = self._overriding("sent")
        self._answered = self._overriding("answered")
        self._handled = self._overriding("handled")
        self._noted = self._overriding("noted")
        self._refitted = self._overriding("refitted")
        self._committed = self._overriding("committed")
        self._show = self._overriding("show")
        self._news = self._overriding("take_news")

    def _overriding(self, name: str) -> list[Callable[..., Any]]:
        """Return a method of the observers that override it."""
        return [
            getattr(each, name) for each in self._observers if getattr(type(each), name) is not vars(Observer)[name]
        ]

    def sent(self, process: str, command: AnyCommand, now: float) -> None:  # noqa: D102 (as Observer's, and so are those below)
        for tell in self._sent:
            tell(process, command, now)

    def answered(self, process: str, reply: Reply | Failed, now: float) -> None:  # noqa: D102
        for tell in self._answered:
            tell(process, reply, now)

    def handled(self, event: Event, scheduler: Scheduler) -> None:  # noqa: D102
        for tell in self._handled:
            tell(event, scheduler)

    def noted(self, text: str) -> None:  # noqa: D102
        for tell in self._noted:
            tell(text)

    def sample_failed(self) -> None:  # noqa: D102
        for each in self._observers:
            each.sample_failed()

    def discarded(self, num_groups: int) -> None:  # noqa: D102
        for each in self._observers:
            each.discarded(num_groups)

    def refitted(self, record: RefitRecord) -> None:  # noqa: D102
        for tell in self._refitted:
            tell(record)

    def lost(self, process: str) -> None:  # noqa: D102
        for each in self._observers:
            each.lost(process)

    def replaced(self, count: int) -> None:  # noqa: D102
        for each in self._observers:
            each.replaced(count)

    def committed(self, record: StepRecord) -> None:  # noqa: D102
        for tell in self._committed:
            tell(record)

    def show(self, scheduler: Scheduler, registry: Registry) -> None:  # noqa: D102
        for tell in self._show:
            tell(scheduler, registry)

    def take_news(self) -> list[str]:  # noqa: D102
        return [line for tell in self._news for line in tell()]

    def close(self) -> None:  # noqa: D102
        for each in reversed(self._observers):
            each.close()
