"""The work of a router in the last minute, for its log. Pure: times are arguments.

It is made of counts that requests keep anyway, once a second and outside of every request.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from router.watch.edge_counters import EdgeCounters
from router.watch.latency_window import LatencyWindow

MINUTE_S = 60.0

Value = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Minute:
    """The fields of the line. Requests are counted where they end, tokens as they come.

    `failed` are requests that the server failed (5xx), `refused` those that it refused (4xx). A
    percentile without data is None. `running` are the choices in progress at the end.
    """

    requests: int
    failed: int
    refused: int
    running: int
    output_tokens: int
    tokens_per_s: float
    ttft_p50_ms: Value
    ttft_p99_ms: Value
    tpot_p50_ms: Value
    tpot_p99_ms: Value

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not (self.requests or self.running or self.output_tokens)

    def fields(self) -> dict[str, Value]:
        """Return the fields by their names."""
        return asdict(self)


class MinuteCounts:
    """The counts of the edge since the last line."""

    def __init__(self, edge: EdgeCounters, now_s: float) -> None:
        self._edge = edge
        self._begin(now_s)

    def on_second(self, num_running: int, now_s: float) -> Minute | None:
        """Take the edge's present interval, which ends now; return the minute where it is over."""
        self._ttft.add(self._edge.ttft)
        self._tpot.add(self._edge.tpot)
        took_s = now_s - self._began_at_s
        if took_s < MINUTE_S:
            return None
        rises = [new - old for new, old in zip(self._counts(), self._before, strict=True)]
        requests, failed, refused, tokens = rises
        ttft_p50, ttft_p99 = self._ttft.percentiles_s(0.5, 0.99)
        tpot_p50, tpot_p99 = self._tpot.percentiles_s(0.5, 0.99)
        self._begin(now_s)
        return Minute(
            requests=requests,
            failed=failed,
            refused=refused,
            running=num_running,
            output_tokens=tokens,
            tokens_per_s=round(tokens / took_s, 1),
            ttft_p50_ms=_ms(ttft_p50),
            ttft_p99_ms=_ms(ttft_p99),
            tpot_p50_ms=_ms(tpot_p50),
            tpot_p99_ms=_ms(tpot_p99),
        )

    def _begin(self, now_s: float) -> None:
        self._began_at_s = now_s
        self._before = self._counts()
        self._ttft, self._tpot = LatencyWindow(1), LatencyWindow(1)

    def _counts(self) -> tuple[int, int, int, int]:
        edge = self._edge
        return edge.num_requests, edge.num_failed, edge.num_refused, edge.num_tokens


def _ms(span_s: Value) -> Value:
    return None if span_s is None else float(f"{1000 * span_s:.3g}")
