"""What a router's log says of each minute."""

from __future__ import annotations

import logging

import pytest

from router.live.feed import LiveFeed
from router.watch.edge_counters import EdgeCounters, RequestError
from router.watch.minute_line import MINUTE_S, Minute, MinuteCounts
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import FakeCluster


def seconds(counts: MinuteCounts, edge: EdgeCounters, first: int, last: int) -> list[Minute]:
    """The minutes that ended, with a sample each second as the feed takes them."""
    ended = []
    for second in range(first, last + 1):
        minute = counts.on_second(0, float(second))
        edge.end_interval()
        if minute is not None:
            ended.append(minute)
    return ended


def refused(status: int) -> RequestError:
    return RequestError(at_s=0.0, endpoint="", request_id="", status=status, code="", text="")


def test_a_minute_has_what_happened_in_it_and_not_before() -> None:
    edge = EdgeCounters()
    edge.on_request_end()
    edge.num_tokens = 7
    counts = MinuteCounts(edge, 0.0)
    for error in (None, None, refused(429), refused(502)):
        edge.on_request_end(error)
    edge.num_tokens += 120
    edge.ttft.observe(0.2)
    assert seconds(counts, edge, 1, 30) == []
    edge.ttft.observe(0.4)
    edge.tpot.observe(0.03)
    (minute,) = seconds(counts, edge, 31, 60)
    assert (minute.requests, minute.failed, minute.refused) == (4, 1, 1)
    assert (minute.output_tokens, minute.tokens_per_s) == (120, 2.0)
    assert minute.ttft_p50_ms == pytest.approx(200, rel=0.03)
    assert minute.ttft_p99_ms == pytest.approx(400, rel=0.03)
    assert minute.tpot_p50_ms == minute.tpot_p99_ms == pytest.approx(30, rel=0.03)
    (quiet,) = seconds(counts, edge, 61, 120)
    assert quiet.is_empty
    assert quiet.ttft_p50_ms is quiet.tpot_p99_ms is None


def test_a_late_sample_makes_a_longer_minute_with_its_own_rate() -> None:
    edge = EdgeCounters()
    counts = MinuteCounts(edge, 0.0)
    edge.num_tokens = 300
    assert counts.on_second(2, 59.9) is None
    minute = counts.on_second(2, 150.0)
    assert minute is not None
    assert (minute.running, minute.tokens_per_s) == (2, 2.0)


def test_the_log_has_a_line_where_something_happened(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    feed = LiveFeed(FakeCluster(), clock)
    with caplog.at_level(logging.INFO, "pdserve.router.minute"):
        for num_requests in (0, 3, 0):
            for _ in range(num_requests):
                feed.edge.on_request_end()
                feed.edge.ttft.observe(0.2)
            clock.advance(MINUTE_S)
            feed.sample()
    records = [one for one in caplog.records if one.name == "pdserve.router.minute"]
    (fields,) = [one.fields for one in records]  # type: ignore[attr-defined]
    assert fields["requests"] == 3
    assert fields["ttft_p50_ms"] == pytest.approx(200, rel=0.03)
    assert fields["tpot_p50_ms"] is None, "no choice has ended"
    assert [one.levelname for one in records] == ["INFO"]
