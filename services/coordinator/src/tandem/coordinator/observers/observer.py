"""Observers: they see a run's events, and have no influence on it.

One exception: an observer may ask for the run's end, as Ctrl-C does. The loop calls one `ObserverGroup` and knows none
of them by name. An observer's own resource, such as a file, must never stop the run: if it fails, the observer gives it
up and says so in a line of news. Nor does a mistake in an observer: `ObserverGroup` counts its exceptions and says so.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.common.messages import AnyCommand, Failed, Reply
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import Event
from tandem.observe.run_folder.journal import RefitRecord, StepRecord

if TYPE_CHECKING:  # commands that start nothing read of a run whether it has ended
    from tandem.coordinator.processes.registry import ProcessRegistry


class ObserverFailures:
    """The exceptions of a run's observers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Exceptions, by observer and method."""
        self.lines: list[str] = []
        """Lines about exceptions that were not taken yet."""

    def note(self, method: Callable[..., Any], error: Exception) -> None:
        """Count an exception, and keep a line about it: of the first, the tenth, the hundredth, ... of a method."""
        name = method.__qualname__
        self.counts[name] += 1
        count = self.counts[name]
        if str(count).strip("0") == "1":
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            text = " ".join(f"{type(error).__name__}: {error}".split())
            times = "" if count == 1 else f", {count} times so far"
            self.lines.append(
                f"warning: the observer {name} has failed ({text}, at {place}){times}: the run goes on without what it "
                "would have shown; please report this"
            )


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

    def amended(self, record: StepRecord) -> None:
        """Handle a finished step to which metrics were added."""

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """Bring what the observer shows up to date. Called several times a second."""

    def take_news(self) -> list[str]:
        """Return lines for the console, each once."""
        return []

    def close(self) -> None:
        """Close the observer's resources."""


class ReportingObserver(Observer):
    """Base of observers with news of their own."""

    def __init__(self) -> None:
        self.news: list[str] = []
        """Lines for the console that were not taken yet."""

    def take_news(self) -> list[str]:
        """Return the news, each once."""
        news, self.news = self.news, []
        return news

    @contextlib.contextmanager
    def going_on(self, gives_up: str, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
        """Go on without the observer's file if the disk rejects it, and say so: close it."""
        try:
            yield
        except errors as error:
            with contextlib.suppress(*errors):
                self.close()
            self.news.append(f"{gives_up}: {error}")


class ObserverGroup:
    """The observers of a run as one, called in the order in which they are given and closed in reverse.

    Each of its attributes is `Observer`'s method of that name, for all observers that have one of their own. An
    exception in one keeps neither the others from being called, nor the run from going on.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.failures = ObserverFailures()
        self.sent: Callable[[str, AnyCommand, float], None] = self._together("sent")
        self.answered: Callable[[str, Reply | Failed, float], None] = self._together("answered")
        self.handled: Callable[[Event, Scheduler], None] = self._together("handled")
        self.noted: Callable[[str], None] = self._together("noted")
        self.sample_failed: Callable[[], None] = self._together("sample_failed")
        self.discarded: Callable[[int], None] = self._together("discarded")
        self.refitted: Callable[[RefitRecord], None] = self._together("refitted")
        self.lost: Callable[[str], None] = self._together("lost")
        self.replaced: Callable[[int], None] = self._together("replaced")
        self.committed: Callable[[StepRecord], None] = self._together("committed")
        self.amended: Callable[[StepRecord], None] = self._together("amended")
        self.show: Callable[[Scheduler, ProcessRegistry], None] = self._together("show")
        self._news = self._find_overrides("take_news")

    def take_news(self) -> list[str]:
        """Return the lines of all observers for the console, each once."""
        news: list[str] = []
        for take in self._news:
            try:
                news += take()
            except Exception as error:
                self.failures.note(take, error)
        if self.failures.lines:
            news += self.failures.lines
            self.failures.lines = []
        return news

    def close(self) -> None:
        """Close the observers' resources."""
        for observer in reversed(self._observers):
            try:
                observer.close()
            except Exception as error:
                self.failures.note(observer.close, error)

    def _together(self, name: str) -> Callable[..., None]:
        """Return a function that calls a method of all observers that have one of their own."""
        methods = self._find_overrides(name)

        def call_each(*arguments: Any) -> None:
            for method in methods:
                try:
                    method(*arguments)
                except Exception as error:
                    self.failures.note(method, error)

        return call_each

    def _find_overrides(self, name: str) -> list[Callable[..., Any]]:
        return [
            getattr(each, name) for each in self._observers if getattr(type(each), name) is not vars(Observer)[name]
        ]
