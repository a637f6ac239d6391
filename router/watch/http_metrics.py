"""Counts and times at the router's HTTP edge. Definitions: `common/observing/latency.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge

from common.observing.clock import Clock
from common.observing.latency import tpot_s
from router.core.ttft_stages import Stage
from router.text.output.choice_text import Delta
from router.text.output.usage import Usage
from router.watch.edge_counters import EdgeCounters, RequestError
from router.watch.loop_metrics import LoopCounter, LoopHistogram
from router.watch.request_watch import RequestWatch

# 2 s to the first token and 150 ms per token are the targets that the benchmarks count by.
_LONG_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_SHORT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5),
    *(1.0, 2.5, 10.0),
)
_STAGE_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0),
)


class RequestEnds:
    """How requests ended: every one by outcome, and those with an error by whose fault it is."""

    def __init__(self, registry: CollectorRegistry, edge: EdgeCounters) -> None:
        self._edge = edge
        self._requests = Counter(
            "pdserve_requests_total",
            "Generation requests by outcome: ok, client_closed, cancelled or an error's code",
            ["endpoint", "outcome"],
            registry=registry,
        )
        # Looked up, for each request, without the client library's lock.
        self._requests_by_end = cache(self._requests.labels)
        self._failed = Counter(
            "pdserve_failed_requests_total",
            "Generation requests that the server failed: status 5xx, or such an error in a stream",
            registry=registry,
        )
        self._refused = Counter(
            "pdserve_refused_requests_total",
            "Generation requests refused with status 4xx: mistakes of clients, and limits",
            registry=registry,
        )

    def count(self, endpoint: str, outcome: str, error: RequestError | None) -> None:
        """Count a request; `error` ended it, if one did."""
        self._requests_by_end(endpoint, outcome).inc()
        if error is not None:
            (self._failed if error.is_failure else self._refused).inc()
        self._edge.on_request_end(error)


class HttpMetrics:
    """One set per app, in the registry that `/metrics` shows."""

    def __init__(self, registry: CollectorRegistry, edge: EdgeCounters | None = None) -> None:
        """Register the metrics; `edge` are the counts for the live page, if there is one."""
        self.edge = edge or EdgeCounters()
        self.ends = RequestEnds(registry, self.edge)
        self.in_progress = Gauge(
            "pdserve_requests_in_progress", "Generation requests now in progress", registry=registry
        )
        self.prompt_tokens = Counter(
            "pdserve_prompt_tokens_total", "Prompt tokens of started requests", registry=registry
        )
        self.cached_tokens = Counter(
            "pdserve_cached_prompt_tokens_total",
            "Prompt tokens found in a prefix cache",
            registry=registry,
        )
        self.accepted_tokens = Counter(
            "pdserve_accepted_prediction_tokens_total",
            "Draft tokens that became output, in the usage of answered requests",
            registry=registry,
        )
        self.rejected_tokens = Counter(
            "pdserve_rejected_prediction_tokens_total",
            "Draft tokens that did not, in the usage of answered requests",
            registry=registry,
        )
        self.output_tokens = LoopCounter("pdserve_output_tokens", "Tokens generated", registry)
        self.ttft = LoopHistogram(
            "pdserve_time_to_first_token_seconds",
            "Arrival of the request to the first token of a choice",
            _LONG_S,
            registry,
        )
        self.ttft_stages = LoopHistogram(
            "pdserve_ttft_stage_seconds",
            "Parts of the time to the first token: their sum is its sum, a stage that a request "
            "did not pass took it 0 s",
            _STAGE_S,
            registry,
            label="stage",
            values=list(Stage),
        )
        self.itl = LoopHistogram(
            "pdserve_inter_token_latency_seconds",
            "Gap between two chunks of a choice",
            _SHORT_S,
            registry,
        )
        self.tpot = LoopHistogram(
            "pdserve_time_per_output_token_seconds",
            "Mean time per token of a choice after its first",
            _SHORT_S,
            registry,
        )
        self.e2e = LoopHistogram(
            "pdserve_request_latency_seconds",
            "Arrival of the request to the last token of a choice",
            _LONG_S,
            registry,
        )

    def count_usage(self, usage: Usage) -> None:
        """Count what an answer found in a cache, and its drafts: most answers have none."""
        for counter, num_tokens in (
            (self.cached_tokens, usage.cached_tokens),
            (self.accepted_tokens, usage.accepted_tokens),
            (self.rejected_tokens, usage.rejected_tokens),
        ):
            if num_tokens:
                counter.inc(num_tokens)


class ChoiceTimer:
    """Times one choice: call `on_deltas` as they come from the generator."""

    def __init__(self, metrics: HttpMetrics, clock: Clock, watch: RequestWatch) -> None:
        self._metrics = metrics
        self._clock = clock
        self._watch = watch
        self._arrived_at_s = watch.arrived_at_s
        self._first_at_s: float | None = None
        self._last_at_s = watch.arrived_at_s
        self._num_tokens = 0

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        """Count deltas that came together as one chunk; without tokens they have no time."""
        now_s, metrics = self._clock.now_s(), self._metrics
        num_tokens = 0
        for delta in deltas:
            num_tokens += delta.num_tokens
        if num_tokens:
            if self._first_at_s is None:
                self._first_at_s = now_s
                self._watch.on_first_token(now_s)
                metrics.ttft.observe(now_s - self._arrived_at_s)
                metrics.edge.ttft.observe(now_s - self._arrived_at_s)
                self._observe_stages(deltas, now_s)
            else:
                metrics.itl.observe(now_s - self._last_at_s)
            self._last_at_s = now_s
            self._num_tokens += num_tokens
            metrics.output_tokens.value += num_tokens
            metrics.edge.num_tokens += num_tokens
        if deltas[-1].details.finish_reason is not None and self._first_at_s is not None:
            tpot = tpot_s(self._first_at_s, self._last_at_s, self._num_tokens)
            if tpot is not None:
                self._metrics.tpot.observe(tpot)
                self._metrics.edge.tpot.observe(tpot)
            self._metrics.e2e.observe(self._last_at_s - self._arrived_at_s)

    def _observe_stages(self, deltas: Sequence[Delta], now_s: float) -> None:
        for delta in deltas:
            found = delta.details.of_prompt
            if found is not None and found.stages is not None:
                for stage, span_s in found.stages.to_client(self._arrived_at_s, now_s).items():
                    self._metrics.ttft_stages.of[stage].observe(span_s)
