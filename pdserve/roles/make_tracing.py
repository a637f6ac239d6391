"""Traces as configured; the OpenTelemetry SDK is imported only where they are on."""

from __future__ import annotations

import os
import socket

from common.errors import ConfigError
from common.observing.clock import MonotonicClock
from common.observing.tracing import NO_TRACING, Tracing
from common.settings.config import Config


def make_tracing(config: Config) -> Tracing:
    """Return the configured tracing.

    Raises `ConfigError` when traces are on and their packages are not installed, or the SDK refuses
    one of its variables, `OTEL_…`.
    """
    endpoint, role = config.tracing.otel_endpoint, config.role
    if not endpoint:
        return NO_TRACING
    try:
        # Imported here: it is slow to import, and an optional dependency.
        from pdserve.roles.otel import OtelTracing
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith(("opentelemetry", "google")):
            raise
        raise ConfigError(
            f"otel_endpoint is {endpoint!r}, and {missing.name} is not installed: wanted "
            "`pip install '.[otel]'`, or no otel_endpoint"
        ) from missing
    except ValueError as error:
        raise _refused(error) from error
    node_id = config.server.node_id or f"{role.value}-{socket.gethostname()}-{os.getpid()}"
    try:
        return OtelTracing(config.tracing, role=role, node_id=node_id, clock=MonotonicClock())
    except Exception as error:  # its exceptions have no common base
        raise _refused(error) from error


def _refused(error: Exception) -> ConfigError:
    return ConfigError(f"traces: {error} (a variable of OpenTelemetry)")
