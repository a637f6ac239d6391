"""What both ends of a handoff measured of it, over each connector."""

from __future__ import annotations

from kv_transfer.contract import Commit, Landed, Revoked, TransferEnded
from tests.support.kv.kv_cluster import LAYOUT, PAIR_BYTES, Cluster

NUM_BYTES = LAYOUT.num_layers * 2 * PAIR_BYTES


def test_a_handoff_is_measured_on_both_sides(cluster: Cluster) -> None:
    p, d = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(d, (4, 5))
    d.connector.expect(ticket, sender_deadline_s=20.0)
    p.connector.open(ticket, deadline_s=20.0)
    p.push_all(ticket, (1, 2))
    p.connector.commit(ticket.lease_token, Commit(num_tokens=8, first_token_id=1))
    assert isinstance(d.wait_event(), Landed)
    assert p.wait_event() == TransferEnded(ticket.lease_token, None)

    lane = cluster.lane
    sent = p.connector.statistics().measured
    assert sent.ended[lane, "committed"] == 1
    for histogram, most in (
        (sent.lanes[lane].sent_bytes, NUM_BYTES),
        (sent.lanes[lane].duration_s, 20.0),
        (sent.lanes[lane].exposed_s, 20.0),
    ):
        assert histogram.count == 1
        assert 0 < histogram.total <= most
    timing = p.connector.last_committed
    assert timing is not None
    assert timing.num_bytes == NUM_BYTES
    assert 0 <= timing.bytes_hidden <= NUM_BYTES
    assert timing.opened_at_s <= timing.first_sent_at_s <= timing.last_acked_at_s
    assert timing.opened_at_s <= timing.committed_at_s <= timing.ended_at_s
    landed = d.connector.statistics().measured.lanes[lane]
    assert landed.landed_bytes.total == NUM_BYTES
    assert landed.landing_s.count == 1
    assert not any(sent.chunks_sent_again.values())
    assert set(sent.reconnects.values()) == {0}


def test_a_transfer_that_was_revoked_is_an_aborted_one(cluster: Cluster) -> None:
    p, d = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(d, (4, 5))
    d.connector.expect(ticket, sender_deadline_s=20.0)
    p.connector.open(ticket, deadline_s=20.0)
    p.push_all(ticket, (1, 2))
    d.connector.revoke(ticket.lease_token)
    ended = p.wait_event()
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, Revoked)
    measured = p.connector.statistics().measured
    counted = {key: count for key, count in measured.ended.items() if count}
    assert counted in ({(cluster.lane, "aborted"): 1}, {("none", "aborted"): 1})
    assert all(lane.duration_s.count == 0 for lane in measured.lanes.values())
    assert d.connector.statistics().measured.lanes[cluster.lane].landing_s.count == 0
