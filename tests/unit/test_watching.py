"""What watches a run: GPU monitor, Prometheus, spans; each by itself."""

from __future__ import annotations

import math
import os
import threading
import urllib.request
from collections.abc import Sequence

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.common.errors import ConfigError
from tandem.common.messages import Generated, MemoryUse, Trained
from tandem.config.schema import GpuMonitoring, LoggerConfig, PrometheusConfig
from tandem.coordinator.loop.recorder import StepMetrics
from tandem.coordinator.observers.watching import NOT_UP
from tandem.observe.exporters.nvml import GpuMonitor, GpuUse, Nvml
from tandem.observe.exporters.prometheus import MetricsExporter
from tandem.observe.exporters.tracing import SpanSender
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.live import LiveEngine, RunStatus
from tandem.observe.timeline import StepSpans, TimelineSpan
from tests.harness.ports import free_port

MEMORY = MemoryUse(peak=1, held=1)


class Driver:
    """Four GPUs of which every reading is another; stands in for a driver."""

    def __init__(self) -> None:
        self.asked: list[Sequence[int] | None] = []
        self.has_read = threading.Event()
        self.is_closed = threading.Event()

    def num_gpus(self) -> int:
        return 4

    def uses(self, indices: Sequence[int] | None = None) -> list[GpuUse]:
        self.asked.append(indices)
        if len(self.asked) > 2:
            self.has_read.set()
            return []
        return [GpuUse(index=0, name="H200", power_w=100.0 * len(self.asked), utilisation=0.5)]

    def close(self) -> None:
        self.is_closed.set()


def opened(driver: Driver) -> Nvml:
    return driver  # type: ignore[return-value]


def test_a_monitor_gives_means_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    driver = Driver()
    logger = LoggerConfig(monitor_gpus=True, gpu_monitoring=GpuMonitoring(collection_interval=0.01))
    monitor = GpuMonitor(logger, lambda: opened(driver))
    assert monitor.means() == {}
    monitor.begin(1, 2)
    assert driver.has_read.wait(60)
    assert monitor.means() == {"power_w": 150.0, "utilisation": 0.5}
    assert monitor.means() == {}
    monitor.close()
    assert driver.is_closed.wait(60)
    assert driver.asked[0] == [3, 2], "those that the process may use, in a circle"


def test_a_monitor_without_gpus_or_that_is_off_does_nothing() -> None:
    off = GpuMonitor(LoggerConfig(), lambda: pytest.fail("it is off"))
    off.begin(0, 1)
    without = GpuMonitor(LoggerConfig(monitor_gpus=True), lambda: None)
    without.begin(0, 1)
    for monitor in (off, without):
        monitor.close()
        assert monitor.means() == {}


def test_what_gpus_did_is_in_a_steps_metrics() -> None:
    metrics = StepMetrics()
    for power, index in ((300.0, 1), (500.0, 2)):
        gpus = {"power_w": power}
        metrics.trained(
            f"trainer-{index}",
            Trained(
                command_id=index,
                step=1,
                version=1,
                metrics={},
                seconds={},
                compute_s=0.1,
                waited_s=0.0,
                has_update=True,
                memory=MEMORY,
                gpus=gpus,
            ),
        )
    generated = Generated(
        command_id=3,
        step=1,
        purpose="train",
        num_samples=1,
        num_tokens=5,
        seconds={},
        memory=MEMORY,
        gpus={"utilisation": 0.9},
    )
    metrics.generated(generated)
    metrics.breakdown({"total": 1.0, "training": 0.5})
    assert metrics.metrics["gpu_power_w_trainer"] == 400.0
    assert metrics.metrics["gpu_utilisation_engine"] == 0.9


def test_what_prometheus_is_served() -> None:
    exporter = MetricsExporter(PrometheusConfig(port=free_port()), NOT_UP)
    try:
        with pytest.raises(ConfigError, match=r"logger.prometheus.port: cannot listen on 127.0.0.1:\d+: "):
            MetricsExporter(PrometheusConfig(port=int(exporter.url.split(":")[2].split("/")[0])), NOT_UP)
        exporter.name_run("a-run")
        exporter.commit(
            StepRecord(
                step=3,
                version=3,
                metrics={"reward": 0.25, "val_easy/loss": 2.0, "gone": math.nan, "step": 9.0},
                seconds={"total": 4.0},
            )
        )
        engines = tuple(
            LiveEngine(name=name, status=status, version=1, outstanding_tokens=7, in_flight=0, host="h", device="CPU")
            for name, status in (("rollout-0", "holding a version"), ("rollout-1", "waiting for a replacement"))
        )
        exporter.show(RunStatus(at=0.0, step=4, num_steps=9, phase="generating", engines=engines))
        exporter.replaced(1)
        with urllib.request.urlopen(exporter.url, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        exporter.close()
    assert {
        "tandem_step 3.0",
        "tandem_reward 0.25",
        "tandem_val_easy_loss 2.0",
        'tandem_step_seconds{phase="total"} 4.0',
        "tandem_engines_up 1.0",
        "tandem_engines 2.0",
        "tandem_replaced_processes_total 1.0",
        'tandem_run_info{run_id="a-run"} 1.0',
    } <= set(lines)
    assert not any(line.startswith("tandem_gone") for line in lines), "it was not measured"
    assert sum(line.startswith("tandem_step ") for line in lines) == 1


STEPS = [
    StepSpans(
        step=1,
        start=100.0,
        end=110.0,
        spans=[
            TimelineSpan(process="rollout-0", what="generating", step=1, start=100.0, end=104.0, detail="4 groups"),
            TimelineSpan(process="coordinator", what="refitting", step=1, start=108.0, end=110.0),
        ],
    )
]


def test_spans_of_a_step() -> None:
    kept, notes = InMemorySpanExporter(), list[str]()
    tracing = SpanSender("memory", "a-run", notes.append, kept)
    tracing.send(STEPS)
    tracing.close()
    spans = {span.name: span for span in kept.get_finished_spans()}
    root, child = spans["step 1"], spans["generating"]
    assert (root.start_time, root.end_time) == (100 * 10**9, 110 * 10**9)
    assert child.parent is not None
    assert root.context is not None
    assert child.parent.span_id == root.context.span_id
    assert child.attributes is not None
    assert dict(child.attributes) == {
        "tandem.process": "rollout-0",
        "tandem.step": 1,
        "tandem.detail": "4 groups",
    }
    assert root.resource.attributes["tandem.run_id"] == "a-run"
    assert spans["refitting"].end_time == 110 * 10**9
    assert notes == []


class Refuses(SpanExporter):
    """A collector that raises, and one that says no."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if os.environ.get("RAISES"):
            raise ConnectionError("gone")
        return SpanExportResult.FAILURE


@pytest.mark.parametrize("raises", ["", "1"])
def test_a_collector_that_is_gone_is_said_once(raises: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAISES", raises)
    notes: list[str] = []
    tracing = SpanSender("http://nowhere", "a-run", notes.append, Refuses())
    for step in range(2000):
        tracing.send([msgspec.structs.replace(STEPS[0], step=step)])
    tracing.close()
    assert notes == ["logger.opentelemetry.endpoint: http://nowhere takes no spans; the run goes on without it"]
