"""What a run is watched by, if that is switched on: page, Prometheus, OpenTelemetry, a supervisor."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.config.schema import Logger
from tandem.launch.page_process import PageProcess
from tandem.launch.supervision import Supervision
from tandem.observe.run_folder.journal import RefitRecord, StepRecord
from tandem.observe.run_folder.live import Live
from tandem.observe.run_folder.timeline_file import StepSpans

if TYPE_CHECKING:  # each needs an extra
    from tandem.coordinator.observers.prometheus import Exporter
    from tandem.observe.exporters.tracing import Tracing


class Watchers:
    """Those that are there are told; none is fine."""

    def __init__(self, supervision: Supervision | None = None) -> None:
        self._supervision = supervision
        self._page: PageProcess | None = None
        self._prometheus: Exporter | None = None
        self._tracing: Tracing | None = None
        self._news: collections.deque[str] = collections.deque()
        """Of threads of their own."""

    def listen(self, logger: Logger, stack: contextlib.ExitStack) -> str:
        """Have Prometheus served until `stack` is left, if that is on; return where. Raises `ConfigError`."""
        if logger.prometheus.port is None:
            return ""
        from tandem.coordinator.observers.prometheus import Exporter

        self._prometheus = Exporter(logger.prometheus)
        stack.callback(self._prometheus.close)
        return self._prometheus.url

    def begin(
        self,
        logger: Logger,
        run_id: str,
        page: PageProcess | None,
        stack: contextlib.ExitStack,
        say: Callable[[str], None],
    ) -> None:
        """Note what run it is, and have its spans sent until `stack` is left, if that is on."""
        self._page = page
        if self._prometheus is not None:
            self._prometheus.name_run(run_id)
        if logger.opentelemetry.endpoint is not None:
            from tandem.observe.exporters.tracing import Tracing

            self._tracing = Tracing(logger.opentelemetry.endpoint, run_id, self._news.append)
            stack.callback(self._end_tracing, say)

    def _end_tracing(self, say: Callable[[str], None]) -> None:
        """Send what is left, and say if that could not be done."""
        assert self._tracing is not None
        self._tracing.close()
        while self._news:
            say(self._news.popleft())

    def show(self, live: Live | None) -> None:
        """Say how the run stands."""
        if self._prometheus is not None:
            self._prometheus.show(live)

    def begin_term(self, newest: StepRecord | None) -> None:
        """Say which step the run goes on after; none if it begins with the first."""
        if self._prometheus is not None:
            self._prometheus.begin_term(newest)

    def commit(self, record: StepRecord) -> None:
        """Say that a step is done."""
        if self._prometheus is not None:
            self._prometheus.commit(record)

    def refitted(self, record: RefitRecord) -> None:
        """Say that a version has reached engines."""
        if self._prometheus is not None:
            self._prometheus.refitted(record)

    def replaced(self, count: int = 1) -> None:
        """Say that processes are replaced; trainers that are started again together are one."""
        if self._supervision is not None:
            self._supervision.replaced(count)
        if self._prometheus is not None:
            self._prometheus.replaced(count)

    def send(self, steps: list[StepSpans]) -> None:
        """Send what the timeline has of steps that are done."""
        if self._tracing is not None:
            self._tracing.send(steps)

    def take_news(self) -> list[str]:
        """Return what has gone wrong with any of them since this was last asked."""
        death = "" if self._page is None else self._page.death()
        return [*(self._news.popleft() for _ in range(len(self._news))), *([death] if death else [])]
