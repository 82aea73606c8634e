"""What the coordinator says for those who look on: live.json, timeline, curves, guests, what watches.

It takes no part in the run, and nothing that goes wrong with it stops that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.common.messages import EngineBuilt, Failed, Order, Reply
from tandem.config import Config
from tandem.coordinator.members.members import Registry
from tandem.coordinator.observers.live_file import LiveFile, Said
from tandem.coordinator.observers.timeline import Timeline
from tandem.coordinator.observers.watchers import Watchers
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import Event
from tandem.observe.run_folder.curves_file import CurvesFile
from tandem.observe.run_folder.guest_servers import GuestServersFile
from tandem.observe.run_folder.journal import RefitRecord, StepRecord


class Onlookers:
    """Is told by the loop what happens."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        steps: range,
        history: Sequence[StepRecord],
        watchers: Watchers,
        said: Said | None = None,
    ) -> None:
        """`steps` are those to come, `history` those that are done; `said` is of the terms before."""
        self._watchers = watchers
        watchers.begin_term(history[-1] if history else None)
        self._news: list[str] = []
        self.live = LiveFile(config, folder, steps.stop - 1, history, said)
        self._guest_servers = GuestServersFile(folder)
        self._timeline = Timeline(folder, steps.start, self._news.append, watchers.send)
        self._curves: CurvesFile | None = None
        with self._watching_curves():
            self._curves = CurvesFile(folder, history)
        self._now = 0.0
        """When the event happened that is dealt with."""

    def sent(self, member: str, order: Order) -> None:
        """Note that a process was asked for something."""
        self._timeline.sent(member, order, time.monotonic())

    def answered(self, reply: Reply | Failed, now: float) -> None:
        """Note that it was carried out, or could not be."""
        self._timeline.answered(reply, now)

    def built(self, member: str, reply: EngineBuilt) -> None:
        """Note where a rollout answers who is no member of the run, if it does."""
        if reply.guests is not None:
            self._guest_servers.open(member, reply.guests)
            self._news.append(f"{member} answers OpenAI's API at {reply.guests.url}/v1")

    def lost(self, member: str) -> None:
        """Note that a process is gone."""
        self._guest_servers.close(member)

    def handled(self, event: Event, scheduler: Scheduler) -> None:
        """Note what the run does after an event."""
        self._now = event.now
        self._timeline.enter(scheduler.phase, event.now)

    def show(self, scheduler: Scheduler, registry: Registry) -> None:
        """Bring what they see up to date."""
        self._timeline.give_up(scheduler.requests.__contains__, time.monotonic())
        self.live.show(scheduler, registry)
        self._watchers.show(self.live.last)

    def take_news(self) -> list[str]:
        """Return what has gone wrong with it since this was last asked."""
        news = [*self._news, *self._watchers.take_news()]
        self._news.clear()
        return news

    def refitted(self, record: RefitRecord) -> None:
        """Note that a version has reached engines."""
        self._watchers.refitted(record)

    def replaced(self) -> None:
        """Note that a process is replaced."""
        self._watchers.replaced()

    def commit(self, record: StepRecord) -> None:
        """Note that a step is done."""
        self.live.commit(record)
        self._watchers.commit(record)
        if self._curves is not None:
            with self._watching_curves():
                self._curves.append(record)
        self._timeline.commit(record.step, record.seconds.get("total", 0.0), self._now)

    def close(self) -> None:
        """Say nothing more: how the run goes on, or ended, others say."""
        self._guest_servers.end()
        self._timeline.close()
        if self._curves is not None:
            self._curves.close()

    @contextlib.contextmanager
    def _watching_curves(self) -> Iterator[None]:
        """What the disk says to it never stops the run; the journal has all of it."""
        try:
            yield
        except OSError as error:
            self._curves = None
            self._news.append(f"curves are read from the journal, which takes longer: {error}")
