"""The server of a run's metrics for Prometheus, at ``/metrics`` of the coordinator.

The run's thread publishes news by replacing whole records; the server's threads read them on each request. The run
never waits for the server.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.common import web
from tandem.common.errors import ConfigError
from tandem.common.network import url_of
from tandem.config.schema import PrometheusConfig
from tandem.observe.run_folder.journal import RefitRecord, StepRecord
from tandem.observe.run_folder.live import RunStatus

_END_S = 1
"""Time for pending answers when the server ends."""
_ENDED_S = 5.0
"""Time for the server's thread to begin, or to end."""
_LOOK_S = 0.01


class MetricsExporter:
    """The server and its content; it runs until it is closed."""

    def __init__(self, settings: PrometheusConfig, not_up: Collection[str]) -> None:
        """Listen. `not_up` are the statuses of engines that are not built, or lost. Raise `ConfigError` if it fails."""
        assert settings.port is not None, "or there is nothing to serve"
        self._told = _Told(not_up)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._told)
        try:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            self._socket = socket.create_server((settings.host, settings.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"logger.prometheus.port: cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"
            ) from error
        self.url = f"{url_of(self._socket)}/metrics"
        config = web.settings(make_asgi_app(registry), end_s=_END_S)
        self._server = web.SignalledServer(config, heeds_signals=False)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def name_run(self, run_id: str) -> None:
        """Set the name of the run."""
        self._told.run_id = run_id

    def begin_attempt(self, newest: StepRecord | None) -> None:
        """Set the step that the run continues after; later steps are invalidated."""
        self._told.step = newest

    def commit(self, record: StepRecord) -> None:
        """Publish a finished step."""
        self._told.step, self._told.committed_at = record, time.monotonic()

    def refitted(self, record: RefitRecord) -> None:
        """Publish a version that has reached engines."""
        self._told.refit = record
        self._told.num_refits += 1

    def replaced(self, count: int) -> None:
        """Count replaced processes."""
        self._told.num_replaced += count

    def show(self, live: RunStatus | None) -> None:
        """Publish the state of the run."""
        self._told.live = live

    def close(self) -> None:
        """Stop serving."""
        deadline = time.monotonic() + _ENDED_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)  # a server that ends while it begins leaves its sockets open
        self._server.should_exit = True
        self._thread.join(_ENDED_S)
        self._socket.close()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


class _Told(Collector):
    """The run's newest records, as a collector for Prometheus."""

    def __init__(self, not_up: Collection[str]) -> None:
        self._not_up = not_up
        self.run_id = ""
        self.step: StepRecord | None = None
        self.committed_at = time.monotonic()
        self.refit: RefitRecord | None = None
        self.num_refits = 0
        self.num_replaced = 0
        self.live: RunStatus | None = None

    def describe(self) -> Iterable[Metric]:
        """Return nothing: no other collector can have the same metrics."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        yield _build_labelled("tandem_run_info", "The run", "run_id", {self.run_id: 1.0})
        since = time.monotonic() - self.committed_at
        yield _gauge("tandem_seconds_since_last_step", "Seconds since a step was done, or the coordinator began", since)
        yield CounterMetricFamily("tandem_replaced_processes", "Processes that were replaced", self.num_replaced)
        yield CounterMetricFamily("tandem_refits", "Weight versions that have reached engines", self.num_refits)
        if self.step is not None:
            yield from _of_step(self.step)
        if self.refit is not None:
            yield _gauge("tandem_refit_version", "The newest version that has reached engines", self.refit.version)
            yield _build_labelled("tandem_refit_seconds", "Seconds of the newest refit", "phase", self.refit.seconds)
            yield _gauge("tandem_refit_bytes", "Bytes copied in the newest refit", sum(self.refit.num_bytes.values()))
        if self.live is not None:
            yield from _of_run(self.live, self._not_up)


def _of_step(record: StepRecord) -> Iterator[Metric]:
    yield _gauge("tandem_step", "The newest step that is done", record.step)
    yield _gauge("tandem_version", "Weight version after that step", record.version)
    yield _build_labelled("tandem_step_seconds", "Wall seconds of that step", "phase", record.seconds)
    names = {"tandem_step", "tandem_version"}
    for name, value in record.metrics.items():
        if math.isfinite(value) and (full := f"tandem_{metric_name(name)}") not in names:
            names.add(full)
            yield _gauge(full, f"{name} of the newest step that is done", value)


def _of_run(live: RunStatus, not_up: Collection[str]) -> Iterator[Metric]:
    groups = {name: getattr(live.groups, name) for name in live.groups.__struct_fields__}
    yield _build_labelled("tandem_groups", "Rollout groups", "state", groups)
    yield _gauge("tandem_step_in_progress", "The step in progress", live.step)
    yield _gauge("tandem_steps_planned", "The last step of the run", live.num_steps)
    yield _gauge("tandem_failed_samples", "Samples on which an environment failed", live.failures)
    up = sum(engine.status not in not_up for engine in live.engines)
    yield _gauge("tandem_engines_up", "Engines that are built, and not lost", up)
    yield _gauge("tandem_engines", "Engines that the run has", len(live.engines))
    outstanding = {engine.name: engine.outstanding_tokens for engine in live.engines}
    yield _build_labelled("tandem_outstanding_tokens", "Tokens that an engine has to keep", "engine", outstanding)


def metric_name(name: str) -> str:
    """Return a journal metric's name, with the characters that Prometheus forbids replaced."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(name, says, value)


def _build_labelled(name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, says, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
