"""Pairs that do without a lane of this node."""

from __future__ import annotations

import numpy as np

from common.ids import Incarnation
from kv_transfer.connector.fallbacks import Fallbacks
from kv_transfer.connector.transfer_metrics import TransferMetrics
from kv_transfer.lanes.pool_memory import host_pool
from kv_transfer.shared.effects import Peer
from tests.support.kv.fake_one_sided_lane import Fabric, FakeOneSidedLane
from tests.support.kv.kv_cluster import LAYOUT

PEER = Peer("there", Incarnation("d", 1))


def test_a_lane_is_offered_again_on_connections_that_did_without_it_and_on_no_later_one() -> None:
    lane = FakeOneSidedLane(Fabric(), host_pool(np.zeros(LAYOUT.pool_shape(4), np.uint8), LAYOUT))
    fallbacks = Fallbacks({"rdma": lane}, TransferMetrics(["rdma", "zmq"]))
    for is_over in (False, True):
        lane.is_full = True
        fallbacks.note(PEER, "zmq")
        assert fallbacks.take_offered_again() == []
        lane.is_full = False
        if is_over:
            fallbacks.forget(PEER)
        assert fallbacks.take_offered_again() == ([] if is_over else [PEER])
        assert fallbacks.take_offered_again() == []
