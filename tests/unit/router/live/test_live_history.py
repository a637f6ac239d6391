"""The live page's numbers: rates of counters, recent percentiles, where requests are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from common.ids import AttemptId, Incarnation
from common.nodes import KVLink, Role
from router.live.history import COLUMNS, NUM_SAMPLES, CounterWindow, LiveHistory
from router.live.reading import LiveRequest, Phase
from router.live.snapshot import (
    MAX_ERROR_CHARS,
    MAX_NODES_SHOWN,
    MAX_REQUESTS_SHOWN,
    SnapshotJson,
)
from router.watch.edge_counters import LATENCY_INTERVALS, EdgeCounters, RequestError
from router.watch.latency_window import LatencyWindow
from router.watch.recent_placements import RecentPlacements
from tests.support.observing.live_readings import node, placed, reading

P1, D1 = Incarnation("p1", 3), Incarnation("d1", 5)


def pushed(window: CounterWindow, *values: int) -> CounterWindow:
    for second, value in enumerate(values):
        window.push({"k": value}, 2.0 * second)
    return window


def test_a_rate_is_that_of_the_window() -> None:
    window = pushed(CounterWindow(2), 100, 110, 130, 170)
    assert (window.rise("k"), window.per_s("k")) == (60, 15.0)
    assert window.per_s("other") == 0.0


def test_what_a_counter_shows_first_is_no_rise() -> None:
    assert pushed(CounterWindow(3), 500).per_s("k") == 0.0
    assert pushed(CounterWindow(3), 500, 500).rise("k") == 0


def test_a_counter_that_fell_began_again() -> None:
    assert pushed(CounterWindow(3), 500, 7).rise("k") == 7


def test_a_key_that_is_left_out_is_forgotten() -> None:
    window = pushed(CounterWindow(1), 10)
    window.push({}, 2.0)
    window.push({"k": 90}, 4.0)
    assert window.rise("k") == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
def test_percentiles_are_close(share: float) -> None:
    window = LatencyWindow(3)
    spans = [0.001 * 1.01**k for k in range(1000)]
    for span in spans:
        window.observe(span)
    (found,) = window.percentiles_s(share)
    exact = spans[min(999, max(0, round(share * 1000) - 1))]
    assert found == pytest.approx(exact, rel=0.03)


def test_an_interval_leaves_the_window_whole() -> None:
    window = LatencyWindow(2)
    window.observe(1.0)
    window.end_interval()
    assert window.percentiles_s(0.5) != [None]
    window.end_interval()
    assert window.percentiles_s(0.5, 0.99) == [None, None]


@pytest.mark.parametrize("span_s", [0.0, -1.0, 1e-30, 1e30])
def test_no_time_is_too_odd(span_s: float) -> None:
    window = LatencyWindow(1)
    window.observe(span_s)
    (found,) = window.percentiles_s(0.5)
    assert found is not None
    assert 0 < found < 1e7


def request_error(status: int, text: str = "why") -> RequestError:
    return RequestError(
        at_s=12.5, endpoint="completions", request_id="q1", status=status, code="c", text=text
    )


def snapshots(history: LiveHistory, *, quotes_requests: bool = True) -> SnapshotJson:
    return SnapshotJson(history, 10.0, quotes_requests=quotes_requests)


def test_a_sample() -> None:
    edge = EdgeCounters()
    history = LiveHistory(edge)
    link = KVLink("d1", "zmq", True, 1000)
    history.add(reading(node(P1, Role.PREFILL, kv_links=(link,)), node(D1, Role.DECODE)), 10.0)
    edge.num_tokens += 30
    edge.on_request_end()
    for status in (502, 400, 429):
        edge.on_request_end(request_error(status))
    edge.ttft.observe(0.2)
    edge.tpot.observe(0.01)
    link = KVLink("d1", "zmq", True, 5000)
    p1 = node(P1, Role.PREFILL, kv_links=(link,), num_preemptions=1)
    d1 = node(D1, Role.DECODE, num_drafted=8, num_accepted=6, num_preemptions=3)
    phases = [Phase.PLACING, Phase.PREFILL, Phase.PREFILL, Phase.TRANSFER, Phase.DECODE]
    requests = [LiveRequest(str(n), phase, D1, None) for n, phase in enumerate(phases)]
    sample = history.add(reading(p1, d1, requests=requests), 12.0)
    assert (sample.placing, sample.prefill, sample.transfer, sample.decode) == (1, 2, 1, 1)
    assert (sample.tokens_per_s, sample.requests_per_s) == (15.0, 2.0)
    assert (sample.failures_per_s, sample.refusals_per_s) == (0.5, 1.0)
    assert (sample.kv_bytes_per_s, sample.preemptions_per_s) == (2000.0, 2.0)
    assert sample.acceptance == 0.75
    assert sample.ttft_p50_s == pytest.approx(0.2, rel=0.03)
    assert sample.tpot_p99_s == pytest.approx(0.01, rel=0.03)
    assert history.kv_bytes_per_s(P1, "d1") == 2000.0
    assert (history.preemptions_per_s(D1), history.acceptance(D1)) == (1.5, 0.75)
    assert history.acceptance(P1) is None
    assert dict(zip(COLUMNS, sample.row(), strict=True))["kv_bytes_per_s"] == 2000


def test_rates_are_those_of_the_last_five_seconds() -> None:
    """Each second's tokens and preemptions are a power of two, so a sum names its seconds."""
    edge, num_preemptions = EdgeCounters(), 0
    history = LiveHistory(edge)
    for second in range(7):
        edge.num_tokens += 2**second
        num_preemptions += 4**second
        d1 = node(D1, Role.DECODE, num_preemptions=num_preemptions)
        sample = history.add(reading(d1), float(second))
    seconds = range(2, 7)
    assert sample.tokens_per_s == sum(2**second for second in seconds) / 5
    assert sample.preemptions_per_s == sum(4**second for second in seconds) / 5
    assert history.preemptions_per_s(D1) == sample.preemptions_per_s


def test_latencies_leave_after_their_window() -> None:
    edge = EdgeCounters()
    history = LiveHistory(edge)
    edge.ttft.observe(1.0)
    found = [history.add(reading(), float(t)).ttft_p50_s for t in range(LATENCY_INTERVALS + 1)]
    assert [value is None for value in found] == [False] * LATENCY_INTERVALS + [True]


def test_a_node_that_starts_again_counts_from_its_start() -> None:
    history = LiveHistory(EdgeCounters())
    history.add(reading(node(D1, Role.DECODE, num_preemptions=7)), 0.0)
    again = node(Incarnation("d1", 6), Role.DECODE, num_preemptions=100)
    assert history.add(reading(again), 1.0).preemptions_per_s == 0


def test_the_ring_is_bounded_and_times_stay_exact() -> None:
    history = LiveHistory(EdgeCounters())
    for second in range(NUM_SAMPLES + 5):
        history.add(reading(), 1_000_000.25 + second)
    assert len(history.samples) == NUM_SAMPLES
    assert history.samples[0].row()[0] == 1_000_005.25


def test_a_snapshot_says_what_every_block_is() -> None:
    history = LiveHistory(EdgeCounters())
    load = {
        "free_blocks": 60,
        "num_cached_blocks": 20,
        "num_reserved_blocks": 1,
        "num_receiving_blocks": 4,
        "num_quarantined_blocks": 2,
        "free_seats": 5,
    }
    now = reading(node(D1, Role.DECODE, **load))
    history.add(now, 0.0)
    (shown,) = snapshots(history).snapshot(now)["nodes"]
    assert shown["blocks"] == {
        "running": 33,
        "reserved": 1,
        "receiving": 4,
        "quarantined": 2,
        "cached": 20,
        "free": 40,
    }
    assert sum(shown["blocks"].values()) == shown["num_blocks"]
    assert (shown["used_seats"], shown["seats"]) == (3, 8)


@pytest.mark.parametrize(
    ("size", "held", "shown"),
    [(400, 100, (100, 400)), (400, 0, (0, 400)), (0, 100, (100, 100)), (0, 0, None)],
)
def test_a_tier_below_the_pool_is_told_with_its_size(
    size: int, held: int, shown: tuple[int, int] | None
) -> None:
    """A node of the release before tells what it holds and no size."""
    history = LiveHistory(EdgeCounters())
    host = {"num_host_blocks": size, "num_prefix_host_blocks": held}
    disk = {"num_disk_blocks": 2 * size, "num_prefix_disk_blocks": 2 * held}
    now = reading(node(D1, Role.DECODE, **host, **disk))
    history.add(now, 0.0)
    (told,) = snapshots(history).snapshot(now)["nodes"]
    found = [(one["tier"], one["held"], one["size"]) for one in told["tiers"]]
    if shown is None:
        assert found == []
    else:
        assert found == [("host memory", *shown), ("disk", 2 * shown[0], 2 * shown[1])]


def test_a_suspected_node_is_told() -> None:
    history = LiveHistory(EdgeCounters())
    heard = node(D1, Role.DECODE)
    now = reading(heard, replace(heard, is_suspected=True))
    history.add(now, 0.0)
    told = [shown["is_suspected"] for shown in snapshots(history).snapshot(now)["nodes"]]
    assert told == [False, True]


def test_a_snapshot_is_json_of_bounded_size() -> None:
    history = LiveHistory(EdgeCounters())
    links = tuple(KVLink(f"d{n}", "zmq", True, n) for n in range(32))
    many = [
        node(Incarnation(f"p{n}", 1), Role.PREFILL, kv_links=links)
        for n in range(MAX_NODES_SHOWN + 10)
    ]
    requests = [LiveRequest(f"q{n}", Phase.PLACING, None, None) for n in range(500)]
    requests += [LiveRequest(f"r{n}", Phase.DECODE, D1, None) for n in range(500)]
    recent = RecentPlacements()
    entry = placed(recent, "r1", D1, at_s=11.23456, attempt=AttemptId("r1", 2), reason="why")
    now = reading(*many, requests=requests, placements=recent)
    history.add(now, 0.0)
    shown = snapshots(history).snapshot(now, [entry])
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert len(shown["nodes"]) == len(shown["pairs"]) == MAX_NODES_SHOWN
    assert shown["num_nodes"] == MAX_NODES_SHOWN + 10
    assert len(shown["requests"]) == MAX_REQUESTS_SHOWN
    assert shown["requests"][-1] == {
        "id": "r499",
        "phase": "decode",
        "decode": "d1",
        "prefill": None,
    }
    assert shown["placements"] == [
        {
            "at_s": 1.235,
            "choice_id": "r1",
            "attempt": 2,
            "request_id": "http-r1",
            "decode": "d1",
            "prefill": None,
            "reason": "why",
            "outcome": "",
            "output_tokens": 0,
            "duration_s": None,
        }
    ]
    recent.end(entry, "stop", num_tokens=7, duration_s=1.23456)
    whole = snapshots(history).history(now, [])
    (ended,) = whole["placements"]
    assert (ended["outcome"], ended["output_tokens"], ended["duration_s"]) == ("stop", 7, 1.235)
    assert (len(whole["columns"]), len(whole["samples"])) == (len(whole["samples"][0]), 1)


def test_errors_say_what_happened_and_quote_no_request_to_other_keys() -> None:
    history = LiveHistory(EdgeCounters())
    now = reading()
    history.add(now, 0.0)
    long = "x" * (MAX_ERROR_CHARS + 1)
    errors = [request_error(400, "user 'Ada' is unknown"), request_error(502, long)]
    shown = snapshots(history).snapshot(now, errors=errors)["errors"]
    assert shown[0] == {
        "at_s": 2.5,
        "request_id": "q1",
        "endpoint": "completions",
        "status": 400,
        "code": "c",
        "text": "user 'Ada' is unknown",
    }
    assert shown[1]["text"] == long[:MAX_ERROR_CHARS]
    guarded = snapshots(history, quotes_requests=False).history(now, errors)["errors"]
    assert [error["text"] for error in guarded] == ["", long[:MAX_ERROR_CHARS]]
