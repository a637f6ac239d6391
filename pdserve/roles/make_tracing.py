"""Traces as configured; the OpenTelemetry SDK is imported only where they are on."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError
from common.observing.clock import MonotonicClock
from common.observing.tracing import NO_TRACING, Tracing
from common.settings.config import Config

FILES = tuple(
    f"OTEL_EXPORTER_OTLP_{traces}{file}"
    for traces in ("TRACES_", "")
    for file in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
)
"""The variables of OpenTelemetry that name files. It reads the last three of them for an `https://`
endpoint alone."""


def make_tracing(config: Config) -> Tracing:
    """Return the configured tracing.

    Raises `ConfigError` when traces are on and their packages are not installed, a file that they
    need cannot be read, or the SDK refuses one of its variables, `OTEL_…`.
    """
    endpoint, role = config.tracing.otel_endpoint, config.role
    if not endpoint:
        return NO_TRACING
    _check_files(FILES if endpoint.startswith("https://") else FILES[:3])
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


def _check_files(variables: Sequence[str]) -> None:
    """Raise `ConfigError` for a file that cannot be read.

    The SDK would log one that is missing with a traceback, and then trust other certificates.
    """
    for name in variables:
        path = os.environ.get(name)
        try:
            if path:
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{name} is {path!r}, which cannot be read: {error.strerror}: wanted a PEM file, "
                "or the variable unset"
            ) from error


def _refused(error: Exception) -> ConfigError:
    return ConfigError(f"traces: {error} (a variable of OpenTelemetry)")
