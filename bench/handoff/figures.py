"""Figures of single handoffs, and their summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.observing.latency import percentile

GB = 1e9
_LESS_IS_WORSE = frozenset({"hidden_share"})
SUMMED_UP = (
    "hidden_share",
    "exposed_ms_p50",
    "exposed_ms_p99",
    "exposed_over_ttft",
    "cpu_s_per_gb_sender",
    "cpu_s_per_gb_receiver",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One prompt: `hidden_bytes` of `num_bytes` were acknowledged before its prefill ended."""

    num_bytes: int
    hidden_bytes: int
    exposed_s: float
    ttft_s: float
    sender_cpu_s: float
    receiver_cpu_s: float


def figures(handoffs: Sequence[Handoff]) -> dict[str, float]:
    """Return the figures of one layout over one transport."""
    num_bytes = sum(one.num_bytes for one in handoffs)
    exposed_ms = [one.exposed_s * 1000 for one in handoffs]
    ttft_ms = [one.ttft_s * 1000 for one in handoffs]
    return {
        "hidden_share": round(sum(one.hidden_bytes for one in handoffs) / num_bytes, 4),
        "exposed_ms_p50": round(percentile(exposed_ms, 50), 3),
        "exposed_ms_p99": round(percentile(exposed_ms, 99), 3),
        "exposed_over_ttft": round(sum(exposed_ms) / sum(ttft_ms), 5),
        "cpu_s_per_gb_sender": round(sum(o.sender_cpu_s for o in handoffs) * GB / num_bytes, 3),
        "cpu_s_per_gb_receiver": round(sum(o.receiver_cpu_s for o in handoffs) * GB / num_bytes, 3),
        "ttft_ms_p50": round(percentile(ttft_ms, 50), 1),
        "mb_per_handoff": round(num_bytes / len(handoffs) / 1e6, 1),
        "handoffs": len(handoffs),
    }


def worst_of(layouts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the worse one of the layouts for each summed-up figure."""
    return {
        key: (min if key in _LESS_IS_WORSE else max)(values[key] for values in layouts.values())
        for key in SUMMED_UP
    }
