"""Trace context as text, and the settings of traces."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from common.observing.tracing import NO_SPAN, NO_TRACING, is_traceparent, trace_id_of
from common.settings.tracing_config import TracingConfig
from protos.codec import request_from_proto, request_to_proto
from tests.support.engine.build import make_request

GOOD = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize("text", [GOOD, GOOD[:-2] + "00", "01" + GOOD[2:]])
def test_a_traceparent(text: str) -> None:
    assert is_traceparent(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        GOOD + "-more",
        GOOD.upper(),
        GOOD.replace("-", "_"),
        "ff" + GOOD[2:],
        f"00-{'0' * 32}-{'cd' * 8}-01",
        f"00-{'ab' * 16}-{'0' * 16}-01",
        GOOD[:-1] + "\n",
        GOOD[:-1] + "٣",
        "0" * 55,
    ],
)
def test_no_traceparent(text: str) -> None:
    assert not is_traceparent(text)


def test_it_travels_with_a_request_and_is_checked() -> None:
    message = request_to_proto(make_request(4))
    assert request_from_proto(message).traceparent == ""
    message.traceparent = GOOD
    assert request_from_proto(message).traceparent == GOOD
    message.traceparent = "x" * 10_000
    with pytest.raises(InvalidRequest, match="traceparent has 10000 characters") as wrong:
        request_from_proto(message)
    assert len(str(wrong.value)) < 200


def test_nothing_is_recorded_when_traces_are_off() -> None:
    span = NO_TRACING.span("request", 0.0, parent=GOOD)
    assert span is NO_SPAN
    assert span.child("x", 1.0) is NO_SPAN
    assert (span.is_recording, span.traceparent, trace_id_of(span.traceparent)) == (False, "", None)


def test_the_trace_of_a_line() -> None:
    assert trace_id_of(GOOD) == "ab" * 16


@pytest.mark.parametrize(
    "endpoint", ["", "http://c:4317", "https://c.example:4317", "http://[::1]:4317/"]
)
def test_good_endpoints(endpoint: str) -> None:
    assert TracingConfig(otel_endpoint=endpoint).problems() == []


@pytest.mark.parametrize(
    "endpoint",
    [
        "c:4317",
        "grpc://c:4317",
        "http://c",
        "http://:4317",
        "http://c:4318/v1/traces",
        "http://c:99999",
        "http://user:secret@c:4317",
        "http://c:0",
    ],
)
def test_endpoints_that_would_lose_every_span(endpoint: str) -> None:
    (problem,) = TracingConfig(otel_endpoint=endpoint).problems()
    assert problem.keys == ("otel_endpoint",)
    assert "http://host:port" in problem.text
    assert "4317" in problem.text


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_is_a_share(ratio: float) -> None:
    assert TracingConfig(otel_sample_ratio=ratio).problems() != []
