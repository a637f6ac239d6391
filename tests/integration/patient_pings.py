"""Pings whose answers may take longer than a test: where a machine stalls, none is lost."""

from __future__ import annotations

import pytest

from router.dispatch.liveness import pings

NEVER_MS = 600_000


def have_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are opened from now on wait for every answer."""
    names = ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    patient = dict(pings.PING_OPTIONS) | dict.fromkeys(names, NEVER_MS)
    monkeypatch.setattr(pings, "PING_OPTIONS", tuple(patient.items()))
