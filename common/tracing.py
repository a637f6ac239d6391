"""Traces as the rest of the code sees them: a few calls, and nothing behind them when they are off.

A span is made from times that were taken anyway: it is begun and ended with times of the process's
monotonic clock, during the work or after it. `traceparent` (W3C Trace Context) names a span to
another process; it is empty where nothing is recorded, so that whoever gets it has nothing to do.
The real thing is `pdserve/roles/otel.py`.
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
    """Some work, from its beginning to its `end`, called once; without it the span is lost."""

    @property
    def is_recording(self) -> bool: ...

    @property
    def traceparent(self) -> str:
        """What a child in another process names as its parent; empty when nothing is recorded."""

    def child(
        self, name: str, began_at_s: float, *, kind: SpanKind = SpanKind.INTERNAL
    ) -> Span: ...

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, at_s: float, attributes: Attributes) -> None: ...

    def end(self, at_s: float, *, error: str = "") -> None:
        """`error`: the code of what went wrong."""


class Tracing(Protocol):
    """Where spans come from. Any thread may call it, and nothing here waits for a network."""

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
        """A span whose parent is named by a `traceparent`, or the first one of a new trace."""

    def close(self) -> None:
        """Send what waits, for a second at most, and end."""


class NoSpan:
    """Nothing is recorded."""

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
    """Traces are off."""

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
    """Whether a text names a span: a version, a trace, a span (neither of them 0) and flags."""
    if len(text) != TRACEPARENT_CHARS:
        return False
    found = _TRACEPARENT.fullmatch(text)
    return found is not None and text[:2] != "ff" and all(int(part, 16) for part in found.groups())


def trace_id_of(traceparent: str) -> str | None:
    """The trace that a span belongs to, for log lines; None for an empty one."""
    return traceparent[3:35] or None
