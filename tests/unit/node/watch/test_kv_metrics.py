"""A connector's counts as Prometheus samples: every transport by its label, sums that agree."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from common.errors import HandoffFailed
from common.ids import Incarnation
from common.nodes import KVLink
from kv_transfer.connector.statistics import ConnectorStatistics
from kv_transfer.connector.transfer_metrics import TransferMetrics
from kv_transfer.shared.effects import Peer
from node.watch.kv_metrics import KvCollector, kv_links
from tests.support.observing.samples import samples

PEER = Peer("tcp://h:1", Incarnation("d", 1))
MIB = 1 << 20


def measured() -> TransferMetrics:
    """A committed transfer of 3 MiB and a landing of 1 MiB over rdma, a failed one over zmq."""
    metrics = TransferMetrics(["zmq", "rdma"])
    metrics.on_open(1, PEER, 100.0)
    metrics.on_chunk(1, PEER, "rdma", 3 * MIB, 101.0)
    metrics.on_acknowledged(PEER, 1, 103.0)
    metrics.on_commit(1, 102.96)
    metrics.on_ended(1, None, 103.0)
    metrics.on_piece(2, "rdma", MIB, 100.0)
    metrics.on_landed(2, 100.002)
    metrics.on_lane(PEER, "zmq")
    metrics.on_open(3, PEER, 100.0)
    metrics.on_chunk(3, PEER, "zmq", MIB, 101.0)
    metrics.on_disconnect(PEER)
    metrics.on_connect(PEER)
    metrics.on_chunk(3, PEER, "zmq", MIB, 101.0)
    metrics.on_ended(3, HandoffFailed("no"), 104.0)
    metrics.on_fallback("rdma", "write_failed")
    return metrics


def connector_statistics() -> ConnectorStatistics:
    return ConnectorStatistics(
        bytes_sent=11,
        bytes_received=12,
        transfers_open=13,
        landings_open=14,
        sessions_open=15,
        blocks_quarantined=16,
        lanes={"d1": "zmq", "d2": "rdma", "d3": "zmq"},
        frames_dropped={"late": 17, "malformed": 0},
        checksum_failures={"zmq": 18, "rdma": 0},
        measured=measured().view(),
    )


def test_links_carry_what_each_pair_has_moved() -> None:
    metrics = TransferMetrics(["zmq", "rdma"])
    other = Peer("tcp://h:2", Incarnation("d2", 1))
    metrics.on_lane(PEER, "zmq")
    metrics.on_lane(other, "rdma")
    metrics.on_open(1, other, 100.0)
    metrics.on_chunk(1, other, "rdma", 3 * MIB, 101.0)
    metrics.on_acknowledged(other, 1, 103.0)
    statistics = replace(connector_statistics(), measured=metrics.view(), lanes={"d2": "rdma"})
    assert kv_links(statistics) == (
        KVLink("d2", "rdma", True, 3 * MIB),
        KVLink("d", "zmq", False, 0),
    )
    # What was sent over one transport is not told of a connection over another.
    (_, link) = kv_links(replace(statistics, lanes={"d2": "rdma", "d": "rdma"}))
    assert link == KVLink("d", "zmq", False, 0)


def shown() -> dict[str, float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(KvCollector(connector_statistics))
    return samples(generate_latest(registry).decode())


def test_counts_and_gauges() -> None:
    of_histograms = ("_bucket", "_sum", "_count")
    counted = {
        key: value
        for key, value in shown().items()
        if value and not key.partition("{")[0].endswith(of_histograms)
    }
    assert counted == {
        "pdserve_kv_sent_bytes_total": 11,
        "pdserve_kv_received_bytes_total": 12,
        "pdserve_kv_open_transfers": 13,
        "pdserve_kv_open_landings": 14,
        "pdserve_kv_senders": 15,
        'pdserve_kv_quarantined_blocks{transport="rdma"}': 16,
        'pdserve_kv_frames_dropped_total{reason="late"}': 17,
        'pdserve_kv_checksum_failures_total{transport="zmq"}': 18,
        'pdserve_kv_pairs{transport="zmq"}': 2,
        'pdserve_kv_pairs{transport="rdma"}': 1,
        'pdserve_kv_transfers_total{outcome="committed",transport="rdma"}': 1,
        'pdserve_kv_transfers_total{outcome="failed",transport="zmq"}': 1,
        'pdserve_kv_chunks_sent_again_total{transport="zmq"}': 1,
        'pdserve_kv_fallbacks_total{reason="write_failed",transport="rdma"}': 1,
        'pdserve_kv_reconnects_total{transport="zmq"}': 1,
    }


def test_histograms_by_transport() -> None:
    found = shown()
    for name, value in (
        ("transfer_bytes", 3 * MIB),
        ("transfer_seconds", 3.0),
        ("transfer_bytes_per_second", 1.5 * MIB),
        ("landing_bytes", MIB),
    ):
        assert found[f'pdserve_kv_{name}_sum{{transport="rdma"}}'] == value
        assert found[f'pdserve_kv_{name}_count{{transport="rdma"}}'] == 1
        assert found[f'pdserve_kv_{name}_count{{transport="zmq"}}'] == 0
    exposed = {
        key.split('"')[1]: value
        for key, value in found.items()
        if key.startswith("pdserve_kv_exposed_seconds_bucket") and "rdma" in key
    }
    assert exposed["0.025"] == 0
    assert exposed["0.05"] == exposed["10.0"] == exposed["+Inf"] == 1
    assert len(exposed) == 17


def test_what_never_happened_is_there_as_0() -> None:
    found = shown()
    for sample in (
        'pdserve_kv_transfers_total{outcome="committed",transport="zmq"}',
        'pdserve_kv_frames_dropped_total{reason="malformed"}',
        'pdserve_kv_checksum_failures_total{transport="rdma"}',
        'pdserve_kv_reconnects_total{transport="rdma"}',
        'pdserve_kv_quarantined_blocks{transport="zmq"}',
        'pdserve_kv_fallbacks_total{reason="unusable",transport="rdma"}',
    ):
        assert found[sample] == 0
