"""A run that is watched from outside: Prometheus scrapes it, and a collector of OpenTelemetry takes its spans."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tandem.common.distribution import install_command
from tandem.launch.doctor.network import measure_peer
from tests.harness.ports import free_port
from tests.harness.runs.monitoring_harness import scraped
from tests.harness.runs.running import Command, coordinator, steps_of, wait_until, write_config


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[ExportTraceServiceRequest] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append(request)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_run_is_scraped_and_sends_its_spans(collector: Collector) -> None:
    logger = {
        "monitor_gpus": True,
        "prometheus": {"port": free_port()},
        "opentelemetry": {"endpoint": collector.endpoint},
    }
    with Command("coordinator", "up", write_config({"grpo": {"max_num_steps": 500}, "logger": logger})) as run:
        url = run.wait_for(r"metrics: (http://127\.0\.0\.1:\d+/metrics)")[1]
        found: dict[str, float] = {}

        def has_steps() -> bool:
            found.clear()
            found.update(scraped(url))
            return found.get("tandem_step", 0) >= 2 and found.get("tandem_engines", 0) > 0

        wait_until(has_steps, run.output, died=lambda: run.process.poll() is not None)
        run.signal(signal.SIGINT)
        assert run.wait() == 130
    done = {step.step: step for step in steps_of()}
    step = done[int(found["tandem_step"])]
    assert found["tandem_version"] == step.version
    assert found["tandem_reward"] == pytest.approx(step.metrics["reward"])
    assert found["tandem_tokens_per_s"] == pytest.approx(step.metrics["tokens_per_s"])
    assert found['tandem_step_seconds{phase="total"}'] == pytest.approx(step.seconds["total"])
    assert found["tandem_engines_up"] == found["tandem_engines"]
    assert found["tandem_replaced_processes_total"] == 0
    assert found['tandem_refit_seconds{phase="transfer"}'] > 0
    assert 0 <= found["tandem_seconds_since_last_step"] < 600
    assert {'tandem_groups{state="waiting"}', 'tandem_groups{state="in_flight"}'} <= found.keys()

    spans = [
        span
        for request in collector.received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    steps = {span.name: span for span in spans if re.fullmatch(r"step \d+", span.name)}
    assert {f"step {number}" for number in done} <= steps.keys()
    first = steps["step 1"]
    within = {span.name for span in spans if span.parent_span_id == first.span_id}
    assert {"generating", "training", "refitting"} <= within
    assert first.end_time_unix_nano - first.start_time_unix_nano == pytest.approx(done[1].seconds["total"] * 1e9, 1e-3)
    assert len({span.span_id for span in spans}) == len(spans)


@pytest.mark.parametrize(
    ("key", "setting", "module", "distribution"),
    [
        ("prometheus.port", 9100, "prometheus_client", "prometheus-client"),
        ("opentelemetry.endpoint", "http://localhost", "opentelemetry", "opentelemetry-exporter-otlp-proto-http"),
    ],
)
def test_without_the_package_it_is_said_which_extra_is_missing(
    key: str, setting: object, module: str, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("hide").mkdir()
    Path(f"hide/{module}.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.abspath("hide"), os.environ.get("PYTHONPATH", "")]))
    ended = coordinator("check", write_config(), f"logger.{key}={setting}")
    assert ended.returncode == 2
    extra = key.partition(".")[0]
    missing = f"the package {distribution} is not installed; {install_command(extra)}"
    assert ended.stderr == f"error: logger.{key}: {missing}\n"


def test_a_doctor_listens_until_it_is_interrupted() -> None:
    with Command("coordinator", "doctor", "--listen", "127.0.0.1:0") as doctor:
        peer = doctor.wait_for(r"listening: coordinator doctor --peer (127\.0\.0\.1:\d+)")[1]
        assert measure_peer(peer).slower > 0
        doctor.wait_for("measured by 127.0.0.1")
        doctor.signal(signal.SIGINT)
        assert doctor.wait() == 130


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = coordinator("up", write_config(), f"logger.prometheus.port={port}")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: logger.prometheus.port: cannot listen on 127.0.0.1:{port}: ")
    assert not Path("run").exists()
