"""A node's KV transfers as Prometheus samples, by transport, made at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.nodes import KVLink
from common.observing.histogram import HistogramView
from kv_transfer.connector.statistics import ConnectorStatistics
from kv_transfer.connector.transfer_metrics import LaneView
from kv_transfer.shared.lanes import ONE_SIDED_LANES
from node.watch.metric_families import counter, counters, counters_by, gauge, gauges, histograms

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
    """Reads the connector's statistics, on any thread."""

    def __init__(self, statistics: Callable[[], ConnectorStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        """Yield every sample of the connector."""
        statistics = self._statistics()
        measured = statistics.measured
        for name, text, histogram in _HISTOGRAMS:
            views = {lane: histogram(view) for lane, view in measured.lanes.items()}
            yield histograms(name, text, "transport", views)
        yield counters_by(
            "kv_transfers",
            "Transfers that ended on their sender: committed, aborted (by one of its two nodes, as "
            "when token 0 ends the answer), unreachable, slow or failed; transport none: before "
            "anything was sent",
            ("transport", "outcome"),
            measured.ended.items(),
        )
        yield counters(
            "kv_chunks_sent_again",
            "Chunks sent again after a connection was lost",
            "transport",
            measured.chunks_sent_again,
        )
        yield counters(
            "kv_reconnects",
            "Connections opened again with transfers under way, by what was lost; transport none: "
            "before one was agreed on",
            "transport",
            measured.reconnects,
        )
        yield counters(
            "kv_checksum_failures",
            "DATA messages with a wrong checksum",
            "transport",
            statistics.checksum_failures,
        )
        yield counters_by(
            "kv_fallbacks",
            "Connections without this transport: unusable, write_failed, not_agreed or full",
            ("transport", "reason"),
            measured.fallbacks.items(),
        )
        yield counters(
            "kv_frames_dropped",
            "Messages dropped before they touched memory",
            "reason",
            statistics.frames_dropped,
        )
        yield from _plain(statistics)


def kv_links(statistics: ConnectorStatistics) -> tuple[KVLink, ...]:
    """Return the decode nodes that this node hands off to, or did lately, latest first."""
    measured, lanes = statistics.measured, statistics.lanes
    return tuple(
        KVLink(node, lane, lanes.get(node) == lane, measured.bytes_to.get(node, 0))
        for node, lane in reversed(list(measured.last_lanes.items()))
    )


def _plain(statistics: ConnectorStatistics) -> Iterator[Metric]:
    yield counter(
        "kv_sent_bytes", "KV that left this node, failed transfers included", statistics.bytes_sent
    )
    yield counter(
        "kv_received_bytes",
        "KV that came to this node, failed landings included",
        statistics.bytes_received,
    )
    yield counter(
        "kv_peer_silences",
        "Decode nodes that did not answer this node's KV connection",
        statistics.measured.num_silences,
    )
    yield gauge("kv_open_transfers", "Transfers under way", statistics.transfers_open)
    yield gauge("kv_open_landings", "Landings that may be written", statistics.landings_open)
    yield gauge("kv_senders", "Prefill nodes connected to this node", statistics.sessions_open)
    lanes = statistics.measured.lanes
    quarantined = dict.fromkeys(ONE_SIDED_LANES, statistics.blocks_quarantined)
    yield gauges(
        "kv_quarantined_blocks",
        "Blocks kept because a sender that failed may still write them",
        "transport",
        {lane: quarantined.get(lane, 0) for lane in lanes},
    )
    num_pairs = Counter(statistics.lanes.values())
    yield gauges(
        "kv_pairs",
        "Decode nodes that this node is connected to, by transport",
        "transport",
        {lane: num_pairs[lane] for lane in lanes},
    )
