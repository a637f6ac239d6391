"""Spans kept in memory, to be looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.observing.tracing import Attributes, Span, SpanKind

TRACE_ID = "ab" * 16


@dataclass
class RecordedSpan:
    """One span; `ended_at_s` is None until it ends, which may happen once."""

    name: str
    parent: str
    began_at_s: float
    tracing: RecordedTracing
    number: int
    ended_at_s: float | None = None
    error: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)

    is_recording = True

    @property
    def traceparent(self) -> str:
        return f"00-{TRACE_ID}-{self.number:016x}-01"

    def child(self, name: str, began_at_s: float, *, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        return self.tracing.span(name, began_at_s, parent=self.name, kind=kind)

    def set(self, attributes: Attributes) -> None:
        assert self.ended_at_s is None, f"{self.name} has ended"
        self.attributes.update(attributes)

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        self.events.append((name, at_s, dict(attributes)))

    def end(self, at_s: float, *, error: str = "") -> None:
        assert self.ended_at_s is None, f"{self.name} has ended"
        assert at_s >= self.began_at_s, self
        self.ended_at_s, self.error = at_s, error


class RecordedTracing:
    """A span's `parent` is the name of a span here, or the `traceparent` from elsewhere."""

    is_on = True

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def span(
        self, name: str, began_at_s: float, *, parent: str, kind: SpanKind = SpanKind.INTERNAL
    ) -> RecordedSpan:
        span = RecordedSpan(name, parent, began_at_s, self, len(self.spans) + 1)
        self.spans.append(span)
        return span

    def close(self) -> None:
        assert self.open() == [], "spans that never ended"

    def open(self) -> list[str]:
        """Names of spans that have not ended."""
        return [span.name for span in self.spans if span.ended_at_s is None]

    def shown(self) -> list[tuple[str, str, float, float | None, str]]:
        """Every span: name, parent, begin, end, error."""
        return [(s.name, s.parent, s.began_at_s, s.ended_at_s, s.error) for s in self.spans]
