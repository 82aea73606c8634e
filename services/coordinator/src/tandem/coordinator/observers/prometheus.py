"""Serve a run's metrics for Prometheus, at ``/metrics`` of the coordinator.

The run's thread says what is new, by putting whole records in the place of older ones; the server's threads read them
whenever they are asked. Nothing that they do is waited for.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.common import web
from tandem.common.errors import ConfigError
from tandem.common.http_server import SignalledServer
from tandem.common.network import url_of
from tandem.config.schema import Prometheus
from tandem.coordinator.scheduler.engines.joining import Stage
from tandem.coordinator.scheduler.engines.table import COMING_BACK
from tandem.observe.run_folder.journal import RefitRecord, StepRecord
from tandem.observe.run_folder.live import Live

_NOT_UP = frozenset(status.value for status in (*COMING_BACK, *Stage))
_END_S = 1
"""For answers that are on their way when the server ends."""
_ENDED_S = 5.0
"""How long the server's thread may take to begin, or to end."""
_LOOK_S = 0.01


class Exporter:
    """The server, and what it tells; it runs until it is closed."""

    def __init__(self, settings: Prometheus) -> None:
        """Raises `ConfigError` if nothing can listen there."""
        assert settings.port is not None, "or there is nothing to serve"
        self._told = _Told()
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
        config = uvicorn.Config(
            make_asgi_app(registry),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            http=web.Protocol,
            backlog=web.backlog(),
            ws="none",
            loop="asyncio",
            timeout_graceful_shutdown=_END_S,
        )
        self._server = SignalledServer(config, heeds_signals=False)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def name_run(self, run_id: str) -> None:
        """Say which run it is."""
        self._told.run_id = run_id

    def begin_term(self, newest: StepRecord | None) -> None:
        """Note which step the run goes on after; steps after it do not count any more."""
        self._told.step = newest

    def commit(self, record: StepRecord) -> None:
        """Note that a step is done."""
        self._told.step, self._told.committed_at = record, time.monotonic()

    def refitted(self, record: RefitRecord) -> None:
        """Note that a version has reached engines."""
        self._told.refit = record
        self._told.num_refits += 1

    def replaced(self, count: int) -> None:
        """Note that so many processes are replaced."""
        self._told.num_replaced += count

    def show(self, live: Live | None) -> None:
        """Note how the run stands."""
        self._told.live = live

    def close(self) -> None:
        """Stop serving."""
        deadline = time.monotonic() + _ENDED_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)  # one that ends while it begins leaves its sockets open
        self._server.should_exit = True
        self._thread.join(_ENDED_S)
        self._socket.close()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


class _Told(Collector):
    """What the run has said last, as Prometheus wants it."""

    def __init__(self) -> None:
        self.run_id = ""
        self.step: StepRecord | None = None
        self.committed_at = time.monotonic()
        self.refit: RefitRecord | None = None
        self.num_refits = 0
        self.num_replaced = 0
        self.live: Live | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing that other collectors could have as well."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        yield _labelled("tandem_run_info", "The run", "run_id", {self.run_id: 1.0})
        since = time.monotonic() - self.committed_at
        yield _gauge("tandem_seconds_since_last_step", "Since a step was done, or the coordinator began", since)
        yield CounterMetricFamily("tandem_replaced_processes", "Processes that were replaced", self.num_replaced)
        yield CounterMetricFamily("tandem_refits", "Weight versions that have reached engines", self.num_refits)
        if self.step is not None:
            yield from _of_step(self.step)
        if self.refit is not None:
            yield _gauge("tandem_refit_version", "The newest version that has reached engines", self.refit.version)
            yield _labelled("tandem_refit_seconds", "Of the newest refit", "phase", self.refit.seconds)
            yield _gauge("tandem_refit_bytes", "Copied in the newest refit", sum(self.refit.num_bytes.values()))
        if self.live is not None:
            yield from _of_run(self.live)


def _of_step(record: StepRecord) -> Iterator[Metric]:
    yield _gauge("tandem_step", "The newest step that is done", record.step)
    yield _gauge("tandem_version", "Weight version after that step", record.version)
    yield _labelled("tandem_step_seconds", "Wall seconds of that step", "phase", record.seconds)
    taken = {"tandem_step", "tandem_version"}
    for name, value in record.metrics.items():
        if math.isfinite(value) and (full := f"tandem_{metric_name(name)}") not in taken:
            taken.add(full)
            yield _gauge(full, f"{name} of the newest step that is done", value)


def _of_run(live: Live) -> Iterator[Metric]:
    groups = {name: getattr(live.groups, name) for name in live.groups.__struct_fields__}
    yield _labelled("tandem_groups", "Rollout groups", "state", groups)
    yield _gauge("tandem_step_in_progress", "The step in progress", live.step)
    yield _gauge("tandem_steps_planned", "The last step of the run", live.num_steps)
    yield _gauge("tandem_failed_samples", "Samples on which an environment failed", live.failures)
    up = sum(engine.status not in _NOT_UP for engine in live.engines)
    yield _gauge("tandem_engines_up", "Engines that are built, and not lost", up)
    yield _gauge("tandem_engines", "Engines that the run has", len(live.engines))
    outstanding = {engine.name: engine.outstanding_tokens for engine in live.engines}
    yield _labelled("tandem_outstanding_tokens", "Tokens that an engine has to keep", "engine", outstanding)


def metric_name(name: str) -> str:
    """Return a metric's name in the journal without what Prometheus does not allow in one."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(name, says, value)


def _labelled(name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, says, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
