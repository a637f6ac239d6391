"""Where the spans of requests are sent, and for how many requests; where decisions are recorded."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from common.settings.setting import SHARE, FormRule, Section, setting


def _is_grpc_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Reading the port is what checks it.
        has_place = bool(parts.hostname and parts.port)
    except ValueError:
        return False
    is_bare = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
    return parts.scheme in ("http", "https") and has_place and is_bare


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig(Section):
    """Traces of requests, and recordings of decisions.

    The exporter reads its other settings from `OTEL_…` variables.
    """

    otel_endpoint: str = setting(
        "",
        "collector that traces are sent to",
        note="default: no traces",
        form=FormRule(
            "http://host:port or https://host:port without a path, for OTLP over gRPC, "
            "usually port 4317",
            lambda url: not url or _is_grpc_url(url),
        ),
        metavar="URL",
    )
    otel_sample_ratio: float = setting(
        1.0, "share of the requests that are traced, unless the caller decides", between=SHARE
    )
    record: str = setting(
        "",
        "folder to record decisions in, for `pdserve simulate --replay`",
        note="default: none; a file for each process, at most 1GiB, without text",
        metavar="DIR",
    )
