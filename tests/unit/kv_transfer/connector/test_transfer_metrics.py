"""What a connector measures of transfers and landings: spans, bytes, and what went wrong."""

from __future__ import annotations

import pytest

from common.errors import HandoffFailed
from common.ids import Incarnation
from common.observing.histogram import Histogram, HistogramView
from kv_transfer.connector.transfer_metrics import MAX_REMEMBERED_PEERS, TransferMetrics
from kv_transfer.contract import Revoked
from kv_transfer.sending.transfer_errors import PeerUnreachable, TransferAborted, TransferSlow
from kv_transfer.shared.effects import Peer

D1, D2 = (Peer(f"tcp://h:{n}", Incarnation(f"d{n}", 1)) for n in (1, 2))
KIB = 1024


def new() -> TransferMetrics:
    return TransferMetrics(["zmq", "rdma"])


def the_only(view: HistogramView) -> float:
    assert view.count == 1
    return view.total


def test_a_transfer_with_most_of_it_hidden() -> None:
    metrics = new()
    metrics.on_open(7, D1, 10.0)
    metrics.on_chunk(7, D1, "zmq", 300 * KIB, 20.0)
    metrics.on_chunk(7, D1, "zmq", 100 * KIB, 21.0)
    metrics.on_acknowledged(D1, 1, 22.0)
    metrics.on_commit(7, 23.0)
    metrics.on_acknowledged(D1, 2, 24.0)
    metrics.on_acknowledged(D1, 2, 90.0)  # repeated credit is no news
    metrics.on_ended(7, None, 25.5)
    timing = metrics.last_committed
    assert timing is not None
    assert (timing.num_bytes, timing.bytes_hidden) == (400 * KIB, 300 * KIB)
    assert (timing.duration_s, timing.sending_s, timing.exposed_s) == (15.5, 4.0, 2.5)
    view = metrics.view()
    zmq = view.lanes["zmq"]
    assert the_only(zmq.sent_bytes) == 400 * KIB
    assert the_only(zmq.duration_s) == 15.5
    assert the_only(zmq.exposed_s) == 2.5
    assert the_only(zmq.bytes_per_s) == 100 * KIB
    assert view.lanes["rdma"].duration_s.count == 0
    assert view.ended["zmq", "committed"] == 1
    assert view.ended["zmq", "failed"] == view.ended["rdma", "committed"] == 0


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "committed"),
        # Also where token 0 ended the answer, so that nothing is to be decoded.
        (TransferAborted("given up"), "aborted"),
        (Revoked("the client has left"), "aborted"),
        (PeerUnreachable("silent"), "unreachable"),
        (TransferSlow("slow"), "slow"),
        (HandoffFailed("no"), "failed"),
    ],
)
def test_a_transfer_that_was_given_up_is_not_counted_as_failed(
    error: HandoffFailed | None, outcome: str
) -> None:
    metrics = new()
    metrics.on_open(7, D1, 10.0)
    metrics.on_ended(7, error, 25.0)
    assert {key: count for key, count in metrics.view().ended.items() if count} == {
        ("none", outcome): 1
    }


@pytest.mark.parametrize("has_sent", [True, False])
def test_a_failed_transfer_is_counted_and_not_timed(has_sent: bool) -> None:
    metrics = new()
    metrics.on_open(7, D1, 10.0)
    if has_sent:
        metrics.on_chunk(7, D1, "rdma", KIB, 20.0)
    metrics.on_ended(7, HandoffFailed("no"), 25.0)
    view = metrics.view()
    assert view.ended["rdma" if has_sent else "none", "failed"] == 1
    assert sum(view.ended.values()) == 1
    assert all(lane.duration_s.count == 0 for lane in view.lanes.values())


def test_what_a_lost_connection_had_not_acknowledged_is_sent_again() -> None:
    metrics = new()
    metrics.on_connect(D1)
    metrics.on_lane(D1, "zmq")
    for token in (7, 8):
        metrics.on_open(token, D1, 10.0)
        metrics.on_chunk(token, D1, "zmq", KIB, 11.0)
    metrics.on_open(9, D2, 10.0)
    metrics.on_chunk(9, D2, "zmq", KIB, 11.0)
    metrics.on_acknowledged(D1, 1, 12.0)
    metrics.on_disconnect(D1)
    metrics.on_disconnect(D1)
    metrics.on_connect(D1)
    metrics.on_chunk(8, D1, "zmq", KIB, 13.0)  # was lost
    metrics.on_chunk(8, D1, "zmq", KIB, 13.0)  # is new
    metrics.on_chunk(7, D1, "zmq", KIB, 13.0)  # is new: the first had arrived
    metrics.on_chunk(9, D2, "zmq", KIB, 13.0)
    metrics.on_acknowledged(D1, 3, 14.0)  # the new connection counts from 0
    metrics.on_commit(8, 14.0)
    metrics.on_ended(8, None, 15.0)
    view = metrics.view()
    assert view.chunks_sent_again == {"zmq": 1, "rdma": 0}
    assert view.reconnects == {"zmq": 1, "rdma": 0}
    assert metrics.last_committed is not None
    assert metrics.last_committed.num_bytes == 2 * KIB


def test_a_connection_closed_for_want_of_work_is_no_reconnect() -> None:
    metrics = new()
    metrics.on_connect(D1)
    metrics.on_open(7, D1, 10.0)
    metrics.on_chunk(7, D1, "zmq", KIB, 11.0)
    metrics.on_ended(7, HandoffFailed("no"), 12.0)
    metrics.on_disconnect(D1)
    metrics.on_connect(D1)
    metrics.on_disconnect(D2)
    assert metrics.view().reconnects == {"zmq": 0, "rdma": 0}


def test_a_landing_is_timed_from_its_first_piece() -> None:
    metrics = new()
    metrics.on_piece(7, "zmq", 3 * KIB, 10.0)
    metrics.on_piece(7, "zmq", KIB, 12.0)
    metrics.on_piece(8, "zmq", KIB, 12.0)
    metrics.on_landing_over(8)
    metrics.on_landed(7, 13.0)
    metrics.on_landed(8, 14.0)
    zmq = metrics.view().lanes["zmq"]
    assert the_only(zmq.landing_s) == 3.0
    assert the_only(zmq.landed_bytes) == 4 * KIB


def test_fallbacks_are_counted_by_lane_and_reason() -> None:
    metrics = new()
    metrics.on_fallback("rdma", "write_failed")
    fallbacks = metrics.view().fallbacks
    assert fallbacks["rdma", "write_failed"] == 1
    assert {key: count for key, count in fallbacks.items() if not count} == {
        ("rdma", "unusable"): 0,
        ("rdma", "not_agreed"): 0,
        ("rdma", "full"): 0,
    }


def test_what_is_over_is_forgotten() -> None:
    metrics = new()
    metrics.on_ended(1, None, 5.0)
    metrics.on_commit(1, 5.0)
    metrics.on_chunk(1, D1, "zmq", KIB, 5.0)
    metrics.on_acknowledged(D1, 1, 5.0)
    metrics.on_acknowledged(D2, 1, 5.0)
    assert sum(metrics.view().ended.values()) == 0
    assert metrics.last_committed is None


def test_values_fall_into_the_first_bucket_that_holds_them() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 9.0):
        histogram.observe(value)
    assert histogram.view() == HistogramView((1.0, 2.0), (2, 2, 2), 16.5)
    assert histogram.view().count == 6


@pytest.mark.parametrize("bounds", [(), (2.0, 1.0), (1.0, 1.0)])
def test_bounds_must_rise(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="rising"):
        Histogram(bounds)


def test_the_last_lane_to_each_node_is_remembered_for_the_latest_ones() -> None:
    metrics = new()
    metrics.on_lane(D1, "zmq")
    for number in range(100, 100 + MAX_REMEMBERED_PEERS - 1):
        metrics.on_lane(Peer("tcp://h:1", Incarnation(f"n{number}", 1)), "zmq")
    metrics.on_lane(D1, "rdma")
    metrics.on_lane(D2, "zmq")
    lanes = metrics.view().last_lanes
    assert len(lanes) == MAX_REMEMBERED_PEERS
    assert "n100" not in lanes
    assert list(lanes.items())[-2:] == [("d1", "rdma"), ("d2", "zmq")]


def test_acknowledged_bytes_are_summed_for_each_node_that_is_remembered() -> None:
    metrics = new()
    metrics.on_lane(D1, "zmq")
    metrics.on_lane(D2, "zmq")
    metrics.on_open(7, D1, 10.0)
    metrics.on_chunk(7, D1, "zmq", 3 * KIB, 11.0)
    metrics.on_chunk(7, D1, "zmq", 2 * KIB, 11.0)
    assert metrics.view().bytes_to == {"d1": 0, "d2": 0}
    metrics.on_acknowledged(D1, 1, 12.0)
    metrics.on_disconnect(D1)
    metrics.on_lane(D1, "zmq")
    metrics.on_chunk(7, D1, "zmq", 2 * KIB, 13.0)
    metrics.on_ended(7, HandoffFailed("no"), 13.5)
    metrics.on_acknowledged(D1, 1, 14.0)  # they travelled, whatever became of the transfer
    assert metrics.view().bytes_to == {"d1": 5 * KIB, "d2": 0}
    for number in range(MAX_REMEMBERED_PEERS):
        metrics.on_lane(Peer("tcp://h:1", Incarnation(f"n{number}", 1)), "zmq")
    assert metrics.view().bytes_to == {f"n{n}": 0 for n in range(MAX_REMEMBERED_PEERS)}
