"""Spans of a timeline's steps, refits and requests, sent to an OpenTelemetry collector.

When a step is done, its spans go to a thread of the library, which sends them. A collector that is slow or gone costs
the run nothing but spans, which is reported once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Tracer, set_span_in_context

from tandem.observe.timeline import COORDINATOR, StepSpans, TimelineSpan

_TIMEOUT_S = 5.0
"""Longest time that the collector takes to answer, also at the end of a run."""
_MOST_SPANS = 1 << 16
"""Most spans waiting to be sent; more are dropped."""


class SpanSender:
    """Sender of spans, until it is closed."""

    def __init__(
        self, endpoint: str, run_id: str, say: Callable[[str], None], exporter: SpanExporter | None = None
    ) -> None:
        """Start; `exporter` replaces the sender to `endpoint`; `say` is called once if spans do not arrive."""
        # Silence the library, which would log each failed batch; the failure is reported once instead.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        watched = _Watched(exporter or OTLPSpanExporter(endpoint, timeout=_TIMEOUT_S), endpoint, say)
        resource = Resource.create({"service.name": "tandem", "tandem.run_id": run_id})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(watched, max_queue_size=_MOST_SPANS, export_timeout_millis=_TIMEOUT_S * 1e3)
        )
        self._tracer: Tracer = self._provider.get_tracer("tandem")

    def send(self, steps: Sequence[StepSpans]) -> None:
        """Send finished steps: a span for each, with nested spans for all that ended during it."""
        for step in steps:
            root = self._tracer.start_span(
                f"step {step.step}", attributes={"tandem.step": step.step}, start_time=_nanoseconds(step.start)
            )
            context = set_span_in_context(root)
            for span in step.spans:
                child = self._tracer.start_span(
                    span.what,
                    context,
                    # Requests go to processes over the network; the coordinator's own spans are phases of the run.
                    SpanKind.INTERNAL if span.process == COORDINATOR else SpanKind.CLIENT,
                    _attributes(span),
                    start_time=_nanoseconds(span.start),
                )
                child.end(_nanoseconds(span.end))
            root.end(_nanoseconds(step.end))

    def close(self) -> None:
        """Send the rest, as long as the collector answers, and end."""
        self._provider.shutdown()


class _Watched(SpanExporter):
    """An exporter that reports once that another exporter's spans do not arrive."""

    def __init__(self, exporter: SpanExporter, endpoint: str, say: Callable[[str], None]) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._say = say
        self._has_said = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # an exception would end the thread, and nothing more would be sent
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS and not self._has_said:
            self._has_said = True
            self._say(f"logger.opentelemetry.endpoint: {self._endpoint} takes no spans; the run goes on without it")
        return result

    def shutdown(self) -> None:
        """Shut the wrapped exporter down."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the wrapped exporter."""
        return bool(self._exporter.force_flush(timeout_millis))


def _attributes(span: TimelineSpan) -> dict[str, str | int]:
    return {"tandem.process": span.process, "tandem.step": span.step, "tandem.detail": span.detail}


def _nanoseconds(unix: float) -> int:
    return int(unix * 1e9)
