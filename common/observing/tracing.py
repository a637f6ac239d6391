"""The interface of tracing: a few calls, which do nothing when tracing is off.

A span begins and ends with times of the process's monotonic clock, which are passed as arguments,
during the work or after it. `traceparent` (W3C Trace Context) names a span to another process; it
is empty when nothing is recorded, and then the other process records nothing either. The
implementation is `pdserve/roles/otel.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Protocol

Attributes = Mapping[str, str | int | float | bool]

TRACEPARENT_CHARS = 55
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


class SpanKind(Enum):
    """Who waits for whom: a server answers another process, a client waits for one."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Span(Protocol):
    """A piece of work. `end` must be called once; without it the span is lost."""

    @property
    def is_recording(self) -> bool: ...

    @property
    def traceparent(self) -> str:
        """The name of this span for a child in another process; empty when nothing is recorded."""

    def child(
        self, name: str, began_at_s: float, *, kind: SpanKind = SpanKind.INTERNAL
    ) -> Span: ...

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, at_s: float, attributes: Attributes) -> None: ...

    def end(self, at_s: float, *, error: str = "") -> None:
        """End the span. `error` is the code of the error that ended the work."""


class Tracing(Protocol):
    """Makes spans. Any thread may call it, and no call waits for the network."""

    @property
    def is_on(self) -> bool: ...

    def span(
        self,
        name: str,
        began_at_s: float,
        *,
        parent: str,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Begin a span below the `traceparent` in `parent`, or a new trace if that is empty."""

    def close(self) -> None:
        """Send the spans that wait, for at most a second, and end."""


class NoSpan:
    """A span that records nothing."""

    is_recording = False
    traceparent = ""

    def child(self, name: str, began_at_s: float, *, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        return self

    def set(self, attributes: Attributes) -> None:
        return None

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        return None

    def end(self, at_s: float, *, error: str = "") -> None:
        return None


class NoTracing:
    """Tracing that is off."""

    is_on = False

    def span(
        self,
        name: str,
        began_at_s: float,
        *,
        parent: str,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        return NO_SPAN

    def close(self) -> None:
        return None


NO_SPAN = NoSpan()
NO_TRACING = NoTracing()


def is_traceparent(text: str) -> bool:
    """Return whether a text names a span: version, trace, span (neither of them 0) and flags."""
    if len(text) != TRACEPARENT_CHARS:
        return False
    found = _TRACEPARENT.fullmatch(text)
    return found is not None and text[:2] != "ff" and all(int(part, 16) for part in found.groups())


def trace_id_of(traceparent: str) -> str | None:
    """Return the trace that a span belongs to, for log lines; None for an empty one."""
    return traceparent[3:35] or None
