"""The definitions of latency: the router measures it live, the benchmarks afterwards.

For a request that arrives at `a` and whose output chunks are emitted at `t_1 … t_m`, with n tokens:

    TTFT  = t_1 - a                     time to first token, with queueing and prefill
    ITL   = t_k - t_(k-1), k = 2 … m    one gap per emitted chunk after the first
    TPOT  = (t_m - t_1) / (n - 1)       time per output token after the first; undefined for n = 1
    E2E   = t_m - a                     arrival to the last token
    goodput                             requests per second that met both the TTFT and TPOT target

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """When one request arrived, when each output chunk was emitted, and the number of tokens.

    Raises `ValueError` without a chunk or token, and for times that go back.
    """

    arrived_at_s: float
    chunk_at_s: tuple[float, ...]
    num_tokens: int

    def __post_init__(self) -> None:
        if not self.chunk_at_s:
            raise ValueError("chunk_at_s is empty: a request without output has no latency")
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens is {self.num_tokens}: wanted at least 1")
        times = (self.arrived_at_s, *self.chunk_at_s)
        if any(later < earlier for earlier, later in pairwise(times)):
            raise ValueError("times go back: wanted arrival, then chunks in order")

    @property
    def ttft_s(self) -> float:
        return self.chunk_at_s[0] - self.arrived_at_s

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gaps between chunks; empty when there is only one chunk."""
        times = self.chunk_at_s
        return tuple(b - a for a, b in pairwise(times))

    @property
    def tpot_s(self) -> float | None:
        return tpot_s(self.chunk_at_s[0], self.chunk_at_s[-1], self.num_tokens)

    @property
    def e2e_s(self) -> float:
        return self.chunk_at_s[-1] - self.arrived_at_s


def tpot_s(first_at_s: float, last_at_s: float, num_tokens: int) -> float | None:
    """Return the seconds per output token after the first; None without a second token."""
    if num_tokens < 2:
        return None
    return (last_at_s - first_at_s) / (num_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """The service level that a request must meet to count as goodput."""

    ttft_s: float
    tpot_s: float

    def are_met_by(self, timing: RequestTiming) -> bool:
        """Return whether `timing` is within both targets. A single token has no TPOT."""
        tpot = timing.tpot_s
        return timing.ttft_s <= self.ttft_s and (tpot is None or tpot <= self.tpot_s)


def goodput_rps(
    timings: Iterable[RequestTiming], targets: LatencyTargets, *, duration_s: float
) -> float:
    """Return the requests per second of `duration_s` that met `targets`.

    Failed requests are not in `timings`. Raises `ValueError` unless `duration_s` is above 0.
    """
    if duration_s <= 0:
        raise ValueError(f"duration_s is {duration_s}: wanted above 0")
    return sum(targets.are_met_by(timing) for timing in timings) / duration_s


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` % lie, interpolated linearly between neighbours.

    Raises `ValueError` without values, or for a percentage outside of 0 to 100.
    """
    if not values:
        raise ValueError("percentile of nothing")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}: wanted 0 to 100")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """Mean and percentiles of a set of latencies, in seconds."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


def summarize(values: Sequence[float]) -> LatencySummary | None:
    """Return mean and percentiles of `values` in seconds; None without values."""
    if not values:
        return None
    return LatencySummary(
        count=len(values),
        mean_s=math.fsum(values) / len(values),
        p50_s=percentile(values, 50),
        p90_s=percentile(values, 90),
        p95_s=percentile(values, 95),
        p99_s=percentile(values, 99),
        max_s=max(values),
    )
