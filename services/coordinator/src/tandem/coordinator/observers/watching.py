"""Observers that pass events on: page, Prometheus, OpenTelemetry, dashboards, supervisor, files."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.messages import EngineBuilt, Failed, Reply
from tandem.config.schema import LoggerConfig
from tandem.coordinator.observers.live_file import LiveFile
from tandem.coordinator.observers.observer import Observer, ReportingObserver
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.engines.joining import JoiningStage
from tandem.coordinator.scheduler.engines.table import COMING_BACK
from tandem.launch.helper_process import PageProcess
from tandem.launch.supervision import SupervisorConnection
from tandem.observe.exporters.telemetry import MetricWriters
from tandem.observe.run_folder.journal import RefitRecord, StepRecord
from tandem.observe.run_folder.live import EngineServersFile
from tandem.observe.timeline import StepSpans

if TYPE_CHECKING:  # each needs an extra
    from tandem.observe.exporters.prometheus import MetricsExporter
    from tandem.observe.exporters.tracing import SpanSender

NOT_UP = frozenset(status.value for status in (*COMING_BACK, *JoiningStage))
"""Statuses, in the live file, of engines that are not built, or lost."""


def serve_prometheus(logger: LoggerConfig, stack: contextlib.ExitStack) -> MetricsExporter | None:
    """Serve Prometheus until `stack` is left, if that is on. Raise `ConfigError` if it cannot listen."""
    if logger.prometheus.port is None:
        return None
    from tandem.observe.exporters.prometheus import MetricsExporter

    exporter = MetricsExporter(logger.prometheus, NOT_UP)
    stack.callback(exporter.close)
    return exporter


class MetricsObserver(Observer):
    """Metrics for Prometheus."""

    def __init__(self, exporter: MetricsExporter, live: LiveFile, newest: StepRecord | None) -> None:
        """`live` has the state of the run; `newest` is the step that it continues after, None at its beginning."""
        self._exporter, self._live = exporter, live
        exporter.begin_attempt(newest)

    def refitted(self, record: RefitRecord) -> None:
        """Count a version that has reached engines."""
        self._exporter.refitted(record)

    def replaced(self, count: int) -> None:
        """Count replacements."""
        self._exporter.replaced(count)

    def committed(self, record: StepRecord) -> None:
        """Show a step's metrics."""
        self._exporter.commit(record)

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """Publish the state of the run."""
        self._exporter.show(self._live.last)


class TraceObserver(Observer):
    """The spans of the timeline, sent to OpenTelemetry."""

    def __init__(self, endpoint: str, run_id: str) -> None:
        from tandem.observe.exporters.tracing import SpanSender

        self._news: collections.deque[str] = collections.deque()
        """Lines of the sending thread."""
        self._tracing: SpanSender = SpanSender(endpoint, run_id, self._news.append)

    def send(self, steps: list[StepSpans]) -> None:
        """Send the timeline of finished steps."""
        self._tracing.send(steps)

    def take_news(self) -> list[str]:
        """Return errors."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def end(self, say: Callable[[str], None]) -> None:
        """Send the rest when the run is over, and report if that fails."""
        self._tracing.close()
        for line in self.take_news():
            say(line)


class PageObserver(Observer):
    """The process of the page beside the run, which may die."""

    def __init__(self, process: PageProcess) -> None:
        self._process = process

    def take_news(self) -> list[str]:
        """Return the cause of its death, if it has died."""
        death = self._process.death()
        return [death] if death else []


class SupervisorObserver(Observer):
    """The supervisor of this coordinator: it waits for heartbeats, and counts replacements."""

    def __init__(self, supervision: SupervisorConnection) -> None:
        self._supervision = supervision

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """Send a heartbeat: the loop goes round."""
        self._supervision.show_life()

    def replaced(self, count: int) -> None:
        """Report replacements."""
        self._supervision.replaced(count)


class DashboardObserver(Observer):
    """TensorBoard, Weights & Biases and MLflow, where they are on."""

    def __init__(self, writers: MetricWriters) -> None:
        self._writers = writers

    def committed(self, record: StepRecord) -> None:
        """Write a step's metrics."""
        self._writers.write(record.step, record.metrics, record.seconds)

    def amended(self, record: StepRecord) -> None:
        """Write a step's metrics again, with those that were added."""
        self.committed(record)


class EngineServers(ReportingObserver):
    """The addresses at which the run's engines answer OpenAI's API."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = EngineServersFile(folder)

    def answered(self, process: str, reply: Reply | Failed, now: float) -> None:
        """Note the address of an engine that was just built."""
        if isinstance(reply, EngineBuilt) and reply.external_requests is not None:
            self._file.open(process, reply.external_requests)
            self.news.append(f"{process} answers OpenAI's API at {reply.external_requests.url}/v1")

    def lost(self, process: str) -> None:
        """Note that the engine answers no more."""
        self._file.close(process)

    def close(self) -> None:
        """Note that no engine answers any more."""
        self._file.end()
