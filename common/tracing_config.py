"""Where the spans of requests go, and of how many requests."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from common.setting import must_be_a_share, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """OpenTelemetry traces. What else the exporter needs it reads from `OTEL_…` variables."""

    otel_endpoint: str = setting(
        "", "send traces to this collector by OTLP/gRPC: http://host:4317 (default: no traces)"
    )
    otel_sample_ratio: float = setting(
        1.0, "share of the requests that are traced; a caller's own decision comes first"
    )

    def problems(self) -> list[str]:
        """Every violated rule, in words."""
        wrong = must_be_a_share("otel_sample_ratio", self.otel_sample_ratio)
        if self.otel_endpoint and not _is_grpc_url(self.otel_endpoint):
            wrong.append(
                f"otel_endpoint is {self.otel_endpoint!r}: wanted http://host:port or "
                "https://host:port without a path, where a collector takes OTLP over gRPC "
                "(its usual port is 4317)"
            )
        return wrong


def _is_grpc_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Reading the port is what checks it.
        has_place = bool(parts.hostname and parts.port)
    except ValueError:
        return False
    is_bare = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
    return parts.scheme in ("http", "https") and has_place and is_bare
