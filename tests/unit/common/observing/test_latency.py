"""The definitions of the latencies, on numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from common.observing.latency import (
    LatencyTargets,
    RequestTiming,
    goodput_rps,
    percentile,
    summarize,
    tpot_s,
)


def timing(*chunk_at_s: float, num_tokens: int | None = None) -> RequestTiming:
    return RequestTiming(
        arrived_at_s=10.0, chunk_at_s=chunk_at_s, num_tokens=num_tokens or len(chunk_at_s)
    )


def test_one_request() -> None:
    one = timing(10.5, 10.75, 11.5)
    assert one.ttft_s == 0.5
    assert one.itl_s == (0.25, 0.75)
    assert one.tpot_s == 0.5
    assert one.e2e_s == 1.5


def test_tpot_counts_tokens_and_itl_counts_chunks() -> None:
    several_per_chunk = timing(10.5, 11.5, num_tokens=5)
    assert several_per_chunk.tpot_s == 0.25
    assert several_per_chunk.itl_s == (1.0,)


def test_a_single_token_has_no_tpot() -> None:
    assert timing(10.5).tpot_s is None
    assert timing(10.5).itl_s == ()
    assert tpot_s(1.0, 2.0, 1) is None


@pytest.mark.parametrize(
    ("chunk_at_s", "num_tokens", "wrong"),
    [((), 1, "empty"), ((9.0,), 1, "go back"), ((11.0, 10.5), 2, "go back"), ((11.0,), 0, "least")],
)
def test_impossible_timings_are_refused(
    chunk_at_s: tuple[float, ...], num_tokens: int, wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        RequestTiming(arrived_at_s=10.0, chunk_at_s=chunk_at_s, num_tokens=num_tokens)


def test_goodput_needs_both_targets_and_includes_their_edge() -> None:
    targets = LatencyTargets(ttft_s=0.5, tpot_s=0.25)
    exact, slow_start = timing(10.5, 10.75), timing(10.625, 10.75)
    slow_tokens, single = timing(10.25, 10.75), timing(10.5)
    met = [targets.are_met_by(t) for t in (exact, slow_start, slow_tokens, single)]
    assert met == [True, False, False, True]
    assert goodput_rps([exact, slow_start, slow_tokens, single], targets, duration_s=4.0) == 0.5
    with pytest.raises(ValueError, match="duration_s"):
        goodput_rps([], targets, duration_s=0.0)


def test_percentiles_interpolate() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert percentile(values, 25) == 1.75
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)
    with pytest.raises(ValueError, match="percent"):
        percentile(values, 101)


def test_summary() -> None:
    summary = summarize([1.0, 2.0, 3.0])
    assert summary is not None
    assert (summary.count, summary.mean_s, summary.p50_s, summary.max_s) == (3, 2.0, 2.0, 3.0)
    assert summary.p90_s == pytest.approx(2.8)
    assert summarize([]) is None
