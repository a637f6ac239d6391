"""The figures of one replay, as one flat record.

preemptions, recomputed_tokens    over the whole replay
mean_pool_use, peak_pool_use      share of blocks that sequences hold; the mean over busy time
mean_batch                        sequences per step
goodput                           requests a second whose TTFT is at most 10 s, and TPOT 0.1 s
completion_s                      from the first arrival to the last token
ttft_s, tpot_s                    as in `common/observing/latency.py`, p50, p90 and p99
gap_s                             the longest gap between two tokens of a request, p50, p90, p99
mean_e2e_s                        arrival to last token: queueing, stalls and recomputation in one
waited_10s                        requests without a seat for over 10 s before their first step
overruns                          broken limits of budget, seats or pool: must be 0
refused, starved, idle_waits      too long for the pool; ended without an answer; empty steps
                                  while a request waited
"""

from __future__ import annotations

from bench.replay.replay import ReplayResult, Served
from common.observing.latency import percentile, tpot_s

LONG_WAIT_S = 10.0
GOOD_TTFT_S = 10.0
GOOD_TPOT_S = 0.1
PERCENTS = (50, 90, 99)

Figures = dict[str, float]


def figures_of(result: ReplayResult) -> Figures:
    """Return all figures of one replay. Starved requests count only as such."""
    answered = [s for s in result.served if s.num_ends]
    tpots = [tpot_s(s.first_at_s, s.last_at_s, s.num_tokens) for s in answered]
    e2e_s = [s.last_at_s - s.arrived_at_s for s in answered]
    return {
        "answered": len(answered),
        "refused": result.num_refused,
        "starved": result.num_starved,
        "overruns": result.num_overruns,
        "idle_waits": result.num_idle_waits,
        "steps": result.num_steps,
        "preemptions": result.num_preemptions,
        "recomputed_tokens": result.num_recomputed_tokens,
        "mean_pool_use": _per(result.pool_use_s, result.busy_s),
        "peak_pool_use": round(result.peak_pool_use, 4),
        "mean_batch": _per(result.sequence_steps, result.num_steps),
        "completion_s": round(result.completion_s, 2),
        **_percentiles("ttft_s", [s.first_at_s - s.arrived_at_s for s in answered]),
        **_percentiles("tpot_s", [t for t in tpots if t is not None]),
        **_percentiles("gap_s", [s.longest_gap_s for s in answered if s.num_tokens > 1]),
        "mean_e2e_s": _per(sum(e2e_s), len(e2e_s)),
        "goodput": _per(sum(map(_is_good, answered)), result.completion_s),
        "waited_10s": sum(map(_has_waited_long, answered)),
    }


def _is_good(served: Served) -> bool:
    token_s = tpot_s(served.first_at_s, served.last_at_s, served.num_tokens)
    is_early = served.first_at_s - served.arrived_at_s <= GOOD_TTFT_S
    return is_early and (token_s is None or token_s <= GOOD_TPOT_S)


def _has_waited_long(served: Served) -> bool:
    return served.began_at_s - served.arrived_at_s > LONG_WAIT_S


def _per(total: float, count: float) -> float:
    return round(total / count, 4) if count else 0.0


def _percentiles(name: str, values: list[float]) -> Figures:
    return {f"{name}_p{p}": round(percentile(values, p), 4) if values else 0.0 for p in PERCENTS}
