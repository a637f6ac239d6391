"""The last minutes of this router and its cluster, one sample a second.

Pure: times are arguments.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from common.ids import Incarnation
from router.core.known.node_view import NodeView
from router.live.reading import Phase, Reading
from router.watch.edge_counters import EdgeCounters

NUM_SAMPLES = 900
"""The number of samples: a quarter of an hour."""

RATE_INTERVALS = 5
"""Intervals over which rates are smoothed. One second holds few requests, and nodes report once a
second, not in step."""

Value = float | None


class CounterWindow:
    """The increases in the last `num_intervals` intervals, by the counters' keys.

    A new counter counts from its first value; one that fell has restarted at 0. A key that is not
    given is dropped, so the given keys bound the memory.
    """

    def __init__(self, num_intervals: int) -> None:
        self._intervals: deque[tuple[float, dict[Hashable, int]]] = deque(maxlen=num_intervals)
        self._values: Mapping[Hashable, int] = {}
        self._at_s: float | None = None

    def push(self, values: Mapping[Hashable, int], now_s: float) -> None:
        """Add the present values of the counters. Keeps `values`."""
        if self._at_s is not None:
            rises: dict[Hashable, int] = {}
            for key, value in values.items():
                before = self._values.get(key, value)
                rise = value - before if value >= before else value
                if rise:
                    rises[key] = rise
            self._intervals.append((now_s - self._at_s, rises))
        self._values, self._at_s = values, now_s

    def rise(self, key: Hashable) -> int:
        """Return the increase of the counter within the window."""
        return sum(rises.get(key, 0) for _, rises in self._intervals)

    def per_s(self, key: Hashable) -> float:
        """Return the increase per second; 0 without two values."""
        span_s = sum(span for span, _ in self._intervals)
        return self.rise(key) / span_s if span_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The values of one moment. Spans are in seconds; a percentile or share without data is None.

    Latencies are of the last 10 seconds, rates of the last 5. `failures_per_s` are requests that
    the server failed (5xx), `refusals_per_s` those that it refused (4xx). `acceptance` is the share
    of verified drafts that became output.
    """

    at_s: float
    placing: int
    prefill: int
    transfer: int
    decode: int
    ttft_p50_s: Value
    ttft_p99_s: Value
    tpot_p50_s: Value
    tpot_p99_s: Value
    tokens_per_s: float
    requests_per_s: float
    failures_per_s: float
    refusals_per_s: float
    kv_bytes_per_s: float
    preemptions_per_s: float
    acceptance: Value

    def row(self) -> list[Value]:
        """Return the values in the order of `COLUMNS`, rounded to what a chart can show."""
        at_s, *values = astuple(self)
        return [round(at_s, 3), *(None if v is None else float(f"{v:.6g}") for v in values)]


COLUMNS = tuple(field.name for field in fields(Sample))


class LiveHistory:
    """Samples, oldest first, and the recent rates of each node and pair of nodes."""

    def __init__(self, edge: EdgeCounters) -> None:
        self._edge = edge
        self._edge_rates = CounterWindow(RATE_INTERVALS)
        self._node_rates = CounterWindow(RATE_INTERVALS)
        self.samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)

    def add(self, reading: Reading, now_s: float) -> Sample:
        """Add the next sample and return it. Ends the edge's interval."""
        self._push(reading.nodes, now_s)
        phases = Counter(request.phase for request in reading.requests)
        ttft_s = self._edge.ttft.percentiles_s(0.5, 0.99)
        tpot_s = self._edge.tpot.percentiles_s(0.5, 0.99)
        self._edge.end_interval()
        names = [node.incarnation for node in reading.nodes]
        links = [(n.incarnation, k.decode) for n in reading.nodes for k in n.load.kv_links]
        drafted = sum(self._node_rates.rise(("drafted", name)) for name in names)
        accepted = sum(self._node_rates.rise(("accepted", name)) for name in names)
        sample = Sample(
            at_s=now_s,
            placing=phases[Phase.PLACING],
            prefill=phases[Phase.PREFILL],
            transfer=phases[Phase.TRANSFER],
            decode=phases[Phase.DECODE],
            ttft_p50_s=ttft_s[0],
            ttft_p99_s=ttft_s[1],
            tpot_p50_s=tpot_s[0],
            tpot_p99_s=tpot_s[1],
            tokens_per_s=self._edge_rates.per_s("tokens"),
            requests_per_s=self._edge_rates.per_s("requests"),
            failures_per_s=self._edge_rates.per_s("failed"),
            refusals_per_s=self._edge_rates.per_s("refused"),
            kv_bytes_per_s=sum(self.kv_bytes_per_s(*link) for link in links),
            preemptions_per_s=sum(self.preemptions_per_s(name) for name in names),
            acceptance=accepted / drafted if drafted else None,
        )
        self.samples.append(sample)
        return sample

    def preemptions_per_s(self, node: Incarnation) -> float:
        """Return how often this node preempted a sequence, recently, per second."""
        return self._node_rates.per_s(("preemptions", node))

    def acceptance(self, node: Incarnation) -> float | None:
        """Return the recent share of this node's drafts that became output; None without drafts."""
        drafted = self._node_rates.rise(("drafted", node))
        return self._node_rates.rise(("accepted", node)) / drafted if drafted else None

    def kv_bytes_per_s(self, prefill: Incarnation, decode_node_id: str) -> float:
        """Return how many bytes of KV moved between the two, recently, per second."""
        return self._node_rates.per_s(("kv", prefill, decode_node_id))

    def _push(self, nodes: Sequence[NodeView], now_s: float) -> None:
        edge = self._edge
        self._edge_rates.push(
            {
                "tokens": edge.num_tokens,
                "requests": edge.num_requests,
                "failed": edge.num_failed,
                "refused": edge.num_refused,
            },
            now_s,
        )
        counters: dict[Hashable, int] = {}
        for node in nodes:
            name, load = node.incarnation, node.load
            counters["preemptions", name] = load.num_preemptions
            counters["drafted", name] = load.num_drafted
            counters["accepted", name] = load.num_accepted
            for link in load.kv_links:
                counters["kv", name, link.decode] = link.num_bytes
        self._node_rates.push(counters, now_s)
