"""A node's KV transfers as Prometheus samples, by transport, made when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from common.nodes import KVLink
from kv_transfer.core.histogram import HistogramView
from kv_transfer.core.lanes import ONE_SIDED_LANES
from kv_transfer.statistics import ConnectorStatistics
from kv_transfer.transfer_metrics import LaneView

_HISTOGRAMS: tuple[tuple[str, str, Callable[[LaneView], HistogramView]], ...] = (
    ("kv_transfer_bytes", "KV sent in a committed transfer", lambda lane: lane.sent_bytes),
    (
        "kv_transfer_seconds",
        "A committed transfer on its sender, from its opening to the acknowledged commit",
        lambda lane: lane.duration_s,
    ),
    (
        "kv_transfer_bytes_per_second",
        "Bytes of a committed transfer by the time from its first chunk to the last one's "
        "acknowledgement",
        lambda lane: lane.bytes_per_s,
    ),
    (
        "kv_exposed_seconds",
        "From the end of the prompt's computation to the acknowledged commit: what decode waits "
        "for KV",
        lambda lane: lane.exposed_s,
    ),
    ("kv_landing_bytes", "KV received in a landing", lambda lane: lane.landed_bytes),
    (
        "kv_landing_seconds",
        "A landing on its receiver, from its first piece to the last check",
        lambda lane: lane.landing_s,
    ),
)


class KvCollector(Collector):
    """Reads what the connector counted, which any thread may do."""

    def __init__(self, statistics: Callable[[], ConnectorStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        """Every sample of the connector."""
        statistics = self._statistics()
        measured = statistics.measured
        for name, text, histogram in _HISTOGRAMS:
            views = {lane: histogram(view) for lane, view in measured.lanes.items()}
            yield _histograms(name, text, views)
        yield _labelled(
            "kv_transfers",
            "Transfers that ended on their sender: committed or failed; transport none: before "
            "anything was sent",
            ("transport", "outcome"),
            measured.ended.items(),
        )
        yield _labelled(
            "kv_chunks_sent_again",
            "Chunks sent again after a connection was lost",
            ("transport",),
            _by_lane(measured.chunks_sent_again),
        )
        yield _labelled(
            "kv_reconnects",
            "Connections opened again with transfers under way, by what was lost; transport none: "
            "before one was agreed on",
            ("transport",),
            _by_lane(measured.reconnects),
        )
        yield _labelled(
            "kv_checksum_failures",
            "Landings with a bad checksum",
            ("transport",),
            _by_lane(statistics.checksum_failures),
        )
        yield _labelled(
            "kv_fallbacks",
            "Connections that do without this transport: unusable, write_failed or not_agreed",
            ("transport", "reason"),
            measured.fallbacks.items(),
        )
        yield _labelled(
            "kv_frames_dropped",
            "Messages dropped before they touched memory",
            ("reason",),
            [((reason,), count) for reason, count in statistics.frames_dropped.items()],
        )
        yield from _plain(statistics)


def kv_links(statistics: ConnectorStatistics) -> tuple[KVLink, ...]:
    """The decode nodes that this node hands off to, or did lately, latest first."""
    measured, lanes = statistics.measured, statistics.lanes
    return tuple(
        KVLink(node, lane, lanes.get(node) == lane, measured.bytes_to.get(node, 0))
        for node, lane in reversed(list(measured.last_lanes.items()))
    )


def _plain(statistics: ConnectorStatistics) -> Iterator[Metric]:
    yield _counter(
        "kv_sent_bytes", "KV that left this node, failed transfers included", statistics.bytes_sent
    )
    yield _counter(
        "kv_received_bytes",
        "KV that came to this node, failed landings included",
        statistics.bytes_received,
    )
    yield _gauge("kv_open_transfers", "Transfers under way", statistics.transfers_open)
    yield _gauge("kv_open_landings", "Landings that may be written", statistics.landings_open)
    yield _gauge("kv_senders", "Prefill nodes connected to this node", statistics.sessions_open)
    lanes = statistics.measured.lanes
    quarantined = dict.fromkeys(ONE_SIDED_LANES, statistics.blocks_quarantined)
    yield _gauges(
        "kv_quarantined_blocks",
        "Blocks kept because a sender that failed may still write them",
        {lane: quarantined.get(lane, 0) for lane in lanes},
    )
    num_pairs = Counter(statistics.lanes.values())
    yield _gauges(
        "kv_pairs",
        "Decode nodes that this node is connected to, by transport",
        {lane: num_pairs[lane] for lane in lanes},
    )


def _histograms(name: str, text: str, views: Mapping[str, HistogramView]) -> Metric:
    family = HistogramMetricFamily(f"pdserve_{name}", text, labels=["transport"])
    for lane, view in sorted(views.items()):
        buckets, below = [], 0
        for bound, count in zip((*view.bounds, float("inf")), view.counts, strict=True):
            below += count
            buckets.append((_number(bound), below))
        family.add_metric([lane], buckets, view.total)
    return family


def _number(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)


def _labelled(
    name: str,
    text: str,
    labels: tuple[str, ...],
    values: Iterable[tuple[tuple[str, ...], int]],
) -> Metric:
    family = CounterMetricFamily(f"pdserve_{name}", text, labels=labels)
    for key, value in sorted(values):
        family.add_metric(key, value)
    return family


def _by_lane(counts: Mapping[str, int]) -> list[tuple[tuple[str, ...], int]]:
    return [((lane,), count) for lane, count in counts.items()]


def _gauges(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"pdserve_{name}", text, labels=["transport"])
    for lane, value in values.items():
        family.add_metric([lane], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"pdserve_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pdserve_{name}", text, value=value)
