"""Traces by the OpenTelemetry SDK, exported by OTLP over gRPC. Imported only where they are on.

The SDK keeps ended spans in a bounded queue and exports them in batches on its own thread. When
the queue is full or the collector is unreachable, spans are lost and nothing else is affected. No
global provider is set, so libraries in this process export no spans.
"""

from __future__ import annotations

import logging
import threading
import time

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from common.nodes import Role
from common.observing.clock import Clock
from common.observing.tracing import NO_SPAN, Attributes, Span, SpanKind, is_traceparent
from common.settings.tracing_config import TracingConfig
from common.version import VERSION

MAX_QUEUED_SPANS = 8192
EXPORT_EVERY_S = 2.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_WITHIN_S = 1.0
_NUM_READINGS = 3
_LIMITS = SpanLimits(max_attribute_length=256, max_span_attributes=48, max_events=64)
_KINDS = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}


class OtelTracing:
    """Spans of one process. The exporter reads its headers and certificates from `OTEL_…`."""

    is_on = True

    def __init__(self, config: TracingConfig, *, role: Role, node_id: str, clock: Clock) -> None:
        # The exporter warns at each batch that a collector is unreachable. Its own rate limit is
        # for errors only.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._clock = clock
        self._exporter = OTLPSpanExporter(endpoint=config.otel_endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.otel_sample_ratio)),
            resource=Resource.create(
                {
                    "service.namespace": "pdserve",
                    "service.name": f"pdserve-{role.value}",
                    "service.version": VERSION,
                    "service.instance.id": node_id,
                }
            ),
            span_limits=_LIMITS,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=EXPORT_EVERY_S * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("pdserve", VERSION)

    def span(
        self,
        name: str,
        began_at_s: float,
        *,
        parent: str,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Start a span, see `observing.tracing.Tracing`; an invalid `parent` starts a new trace."""
        # One offset for all spans of a request here, so that they fit each other exactly.
        offset_ns = wall_offset_ns(self._clock)
        context = (
            _context_of(parent)
            if is_traceparent(parent)
            else trace.set_span_in_context(trace.INVALID_SPAN)
        )
        span = self._tracer.start_span(
            name,
            context,
            kind=_KINDS[kind],
            start_time=offset_ns + round(began_at_s * 1e9),
        )
        return OtelSpan(self._tracer, span, offset_ns) if span.is_recording() else NO_SPAN

    def close(self) -> None:
        """Export the queued spans; give up after `CLOSE_WITHIN_S`."""
        give_up = threading.Timer(CLOSE_WITHIN_S, self._exporter.shutdown)
        give_up.daemon = True
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()


class OtelSpan:
    """One span that is recorded."""

    is_recording = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        flags = int(context.trace_flags)
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def child(self, name: str, began_at_s: float, *, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            kind=_KINDS[kind],
            start_time=self._ns(began_at_s),
        )
        return OtelSpan(self._tracer, span, self._offset_ns)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        self._span.add_event(name, attributes, timestamp=self._ns(at_s))

    def end(self, at_s: float, *, error: str = "") -> None:
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR))
        self._span.end(self._ns(at_s))

    def _ns(self, at_s: float) -> int:
        return self._offset_ns + round(at_s * 1e9)


def wall_offset_ns(clock: Clock) -> int:
    """Return the wall clock minus `clock`, in nanoseconds.

    The thread may be descheduled between two readings, so the closest of a few pairs counts.
    Otherwise an event in one process could appear before its cause in another.
    """
    pairs = []
    for _ in range(_NUM_READINGS):
        before_s, wall_ns, after_s = clock.now_s(), time.time_ns(), clock.now_s()
        pairs.append((after_s - before_s, wall_ns - round((before_s + after_s) / 2 * 1e9)))
    return min(pairs)[1]


def _context_of(traceparent: str) -> Context:
    remote = trace.SpanContext(
        trace_id=int(traceparent[3:35], 16),
        span_id=int(traceparent[36:52], 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(traceparent[53:55], 16)),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote))
