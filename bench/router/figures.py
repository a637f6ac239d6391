"""From counts to figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.router.load import LoadResult


def figures(load: LoadResult, used_cpu_s: Mapping[str, float]) -> dict[str, object]:
    """Return one load's figures. `used_cpu_s` is by process, the "router" among them."""
    return {
        "tokens_per_s": round(load.num_tokens / load.seconds),
        "requests_per_s": round(load.num_requests / load.seconds, 1),
        "tokens_per_event": round(load.num_tokens / load.num_token_events, 2),
        "ttft_added_ms_p50": round(quantile(load.ttft_s, 0.5) * 1000, 2),
        "ttft_added_ms_p99": round(quantile(load.ttft_s, 0.99) * 1000, 2),
        "cpu_s_per_1k_requests": round(used_cpu_s["router"] / load.num_requests * 1000, 3),
        "cpu_share": {name: round(cpu / load.seconds, 2) for name, cpu in used_cpu_s.items()},
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]
