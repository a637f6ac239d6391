"""A collector that takes OTLP traces over gRPC and keeps them; the exporters before it are real."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """One span; ids in hexadecimal, `parent_id` empty at the root."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_at_ns: int
    ended_at_ns: int
    is_error: bool
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]


class OtlpCollector(services.TraceServiceServicer):
    """Every span that came, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def Export(  # noqa: N802
        self, request: messages.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> messages.ExportTraceServiceResponse:
        """A batch came."""
        with self._lock:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self._spans += [_received(service, span) for span in scope.spans]
        return messages.ExportTraceServiceResponse()


@contextlib.contextmanager
def otlp_collector(port: int) -> Iterator[OtlpCollector]:
    """Listens on loopback."""
    collector = OtlpCollector()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    services.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_at_ns=span.start_time_unix_nano,
        ended_at_ns=span.end_time_unix_nano,
        is_error=span.status.code == 2,
        attributes=_values(span.attributes),
        events={event.name: _values(event.attributes) for event in span.events},
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
        for pair in attributes
    }
