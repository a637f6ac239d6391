"""Lanes whose copies are completed later: nothing is acknowledged, landed or released before."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout, LayerShape
from kv_transfer.connector.receiving_end import ReceivingEnd
from kv_transfer.connector.shell import TransportConnector
from kv_transfer.contract import (
    ConnectorEvent,
    Landed,
    LandingFailed,
    Released,
    Ticket,
    TransferEnded,
)
from kv_transfer.lanes.lane import Copied
from kv_transfer.lanes.pool_memory import Bytes, Pool
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.limits import MAX_WAIT_S, Limits
from kv_transfer.shared.pool_shape import PoolShape
from kv_transfer.transport import Parts
from tests.support.clocks.stall_free_clock import StallFreeClock
from tests.support.engine.device_memory import DeviceMemory
from tests.support.kv.fake_late_lane import Copier, FakeLateLane
from tests.support.kv.kinds import FakeLateKind
from tests.support.kv.kv_cluster import (
    PAIR_BYTES,
    WAIT_S,
    Cluster,
    Node,
    assert_ended_once,
    commit_for,
    error_of,
    send,
    wait_until,
)
from tests.support.kv.loopback_connector import LoopbackNetwork, LoopbackTransport

TARGETS, SOURCES = (1, 2, 3), (4, 5, 6)


@pytest.fixture
def kind() -> FakeLateKind:
    return FakeLateKind()


@pytest.fixture
def cluster(kind: FakeLateKind) -> Iterator[Cluster]:
    cluster = Cluster(kind)
    yield cluster
    kind.copier.release()
    cluster.close()


def begin(cluster: Cluster, kind: FakeLateKind, **options: str) -> tuple[Node, Node, Ticket]:
    """Start a whole handoff whose first copy is held."""
    prefill, decode = (cluster.node(name, verify=options.get("verify", "auto")) for name in "pd")
    kind.copier.hold()
    ticket = cluster.ticket(decode, TARGETS)
    send(prefill, decode, ticket, SOURCES)
    kind.copier.wait_under_way(1)
    return prefill, decode, ticket


def ack_count(node: Node) -> int:
    (session,) = node.connector.receiving.machine.sessions.all()
    return session.num_acknowledged


@pytest.mark.parametrize("verify", ["block", "commit", "off"])
def test_nothing_is_acknowledged_or_landed_before_its_copy_is_over(
    cluster: Cluster, kind: FakeLateKind, verify: str
) -> None:
    prefill, decode, ticket = begin(cluster, kind, verify=verify)
    wanted = decode.pool.copy()
    wanted[:, :, TARGETS] = prefill.pool[:, :, SOURCES]
    num_over = 0
    while not decode.events:
        decode.look_at_the_time()
        assert ack_count(decode) <= num_over
        assert decode.events == prefill.events == []
        num_over += 1
        kind.copier.release(1)
        # Then the next frames come, or it has landed.
        wait_until(lambda: kind.copier.num_over == num_over)  # noqa: B023
        wait_until(lambda: kind.copier.num_under_way or decode.events)
    assert num_over >= 3
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket))
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool, wanted)
    assert_ended_once(prefill, decode)


def test_a_copy_that_is_over_does_not_wait_until_all_that_arrived_are_begun(
    cluster: Cluster, kind: FakeLateKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender may send the next frame meanwhile."""
    prefill, decode = (cluster.node(name) for name in "pd")
    num_taken, numbers, taken_before = 0, itertools.count(1), dict[int, int]()
    begin_copy, take_copied = FakeLateLane.begin_copy, FakeLateLane.take_copied

    def begun(lane: FakeLateLane, write: Write, parts: Parts, pool: Pool) -> None:
        number = next(numbers)
        if number == 1:  # The others arrive before this one is over.
            wait_until(lambda: prefill.connector.statistics().bytes_sent == 9 * PAIR_BYTES)
        if number == 2:  # The first one is over only now.
            kind.copier.release()
            wait_until(lambda: kind.copier.num_over)
        taken_before[number] = num_taken
        begin_copy(lane, write, parts, pool)

    def taken(lane: FakeLateLane) -> list[Copied]:
        nonlocal num_taken
        copied = take_copied(lane)
        num_taken += len(copied)
        return copied

    monkeypatch.setattr(FakeLateLane, "begin_copy", begun)
    monkeypatch.setattr(FakeLateLane, "take_copied", taken)
    kind.copier.hold()
    ticket = cluster.ticket(decode, TARGETS)
    send(prefill, decode, ticket, SOURCES)
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket))
    assert taken_before[1] == taken_before[2] == 0 < taken_before[3]


@pytest.mark.covers("F14", "F56")
@pytest.mark.parametrize("how", ["revoke", "abort", "close"])
def test_the_blocks_of_what_ended_are_held_until_the_copies_are_over(
    cluster: Cluster, kind: FakeLateKind, how: str
) -> None:
    """Also while the next owner of the blocks already waits for them."""
    prefill, decode, ticket = begin(cluster, kind)
    if how == "revoke":
        decode.connector.revoke(ticket.lease_token)
    elif how == "abort":
        prefill.connector.abort(ticket.lease_token)
    else:
        prefill.connector.close()
    wait_until(lambda: decode.connector.statistics().blocks_quarantined == len(TARGETS))
    next_ticket = cluster.ticket(decode, TARGETS[:1])
    with pytest.raises(ValueError, match="target block 1 was not released yet"):
        decode.connector.expect(next_ticket, sender_deadline_s=30)
    assert not any(isinstance(event, Released) for event in decode.events)

    before = decode.pool.copy()
    kind.copier.release()
    wait_until(lambda: any(isinstance(event, Released) for event in decode.events))
    assert kind.copier.num_under_way == 0
    assert not np.array_equal(decode.pool, before)  # The copy went on until then.
    owned = decode.pool.copy()
    assert [type(event) for event in decode.events][-1] is Released
    assert not any(isinstance(event, Landed) for event in decode.events)

    other = cluster.node("q")
    send(other, decode, next_ticket, [7])
    wait_until(lambda: any(isinstance(event, Landed) for event in decode.events))
    owned[:, :, 1] = other.pool[:, :, 7]
    assert np.array_equal(decode.pool, owned)


def test_a_connection_that_breaks_leaves_its_copies_to_their_end(
    cluster: Cluster, kind: FakeLateKind
) -> None:
    """The landing continues on the next connection; it lands when the earlier copies are over."""
    prefill, decode, ticket = begin(cluster, kind)
    (earlier,) = decode.connector.receiving.machine.sessions.all()
    kind.network.cut(decode.connector.endpoint)
    wait_until(lambda: _is_replaced(decode, earlier.id))
    assert decode.events == []
    kind.copier.release()
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    wait_until(lambda: kind.copier.num_under_way == 0)
    assert np.array_equal(decode.pool[:, :, TARGETS], prefill.pool[:, :, SOURCES])
    assert_ended_once(prefill, decode)


def _is_replaced(decode: Node, session_id: bytes) -> bool:
    sessions = decode.connector.receiving.machine.sessions.all()
    return [one.id for one in sessions] not in ([], [session_id])


def test_a_landing_that_is_revoked_before_its_copy_begins_is_released(
    cluster: Cluster, kind: FakeLateKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frame is acknowledged all the same: the sender's other transfers wait for the credit."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket, other = (cluster.ticket(decode, targets) for targets in (TARGETS, (7, 8, 9)))
    begin_copy = ReceivingEnd.begin_copy

    def revoke_first(end: ReceivingEnd, *args: Any) -> None:
        if decode.connector.statistics().landings_open == 2:
            decode.connector.revoke(ticket.lease_token)
        begin_copy(end, *args)

    monkeypatch.setattr(ReceivingEnd, "begin_copy", revoke_first)
    decode.connector.expect(other, sender_deadline_s=30)
    send(prefill, decode, ticket, SOURCES)
    assert decode.wait_event() == Released(ticket.lease_token)
    assert "revoked the lease" in str(error_of(prefill.wait_event()))
    prefill.connector.open(other, deadline_s=30)
    prefill.push_all(other, SOURCES)
    prefill.connector.commit(other.lease_token, commit_for(other))
    assert decode.wait_event() == Landed(other.lease_token, commit_for(other))
    assert prefill.wait_event() == TransferEnded(other.lease_token, None)
    assert_ended_once(prefill, decode)


def test_a_copy_that_fails_fails_its_landing(cluster: Cluster, kind: FakeLateKind) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    kind.copier.fails_next = True
    send(prefill, decode, cluster.ticket(decode, TARGETS), SOURCES)
    failed = decode.wait_event()
    assert isinstance(failed, LandingFailed)
    assert "the device refused a copy" in str(failed.error)
    assert isinstance(decode.wait_event(), Released)
    assert "the device refused a copy" in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill, decode)


def test_closing_waits_for_the_copies(cluster: Cluster, kind: FakeLateKind) -> None:
    """Afterwards the pool's memory may be freed."""
    _, decode, ticket = begin(cluster, kind)
    closing = threading.Thread(target=decode.connector.close)
    closing.start()
    wait_until(lambda: decode.connector.is_closing)
    closing.join(0.05)
    assert closing.is_alive()
    assert decode.events == []
    kind.copier.release()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert kind.copier.num_under_way == 0
    assert [type(event) for event in decode.events] == [LandingFailed, Released]
    assert {event.lease_token for event in decode.events} == {ticket.lease_token}


class _DeviceNode:
    """A connector whose pool is a device's memory, with no lane that looks at bytes."""

    def __init__(self, name: str, network: LoopbackNetwork, copier: Copier) -> None:
        self.shape = PoolShape.of(OF_TWO_KINDS, 12)
        self.memory = DeviceMemory(self.shape.num_bytes)
        self.me = Incarnation(name, 1)
        self.inbox: queue.SimpleQueue[ConnectorEvent] = queue.SimpleQueue()
        rng = np.random.default_rng(ord(name))
        self.memory.content[:] = rng.integers(0, 256, self.shape.num_bytes)
        pool = Pool(self.shape, self.memory)
        self.connector = TransportConnector(
            pool,
            OF_TWO_KINDS,
            self.me,
            self.inbox.put,
            transport=LoopbackTransport(network),
            lanes=[FakeLateLane(copier, pool)],
            clock=StallFreeClock(MAX_WAIT_S),
            limits=Limits(window_bytes=2048),
        )

    def piece(self, layer: int, plane: int, block: int) -> Bytes:
        at, size = self.shape.offset(layer, plane, block), self.shape.layers[layer].piece_bytes
        return self.memory.content[at : at + size]


OF_TWO_KINDS = KVLayout.of_layers(
    (LayerShape(2, 2, 8), LayerShape(1, 1, 40)), model_digest="m", block_size=4, dtype="float32"
)


def test_between_the_memories_of_devices() -> None:
    """No part of a connector looks at their bytes but the lane."""
    nodes: list[_DeviceNode] = []

    def planes_of(pool: Pool, layer: int) -> list[Bytes]:
        (node,) = (node for node in nodes if node.memory is pool.memory)
        of_layer = node.shape.layers[layer]
        at, num_bytes = node.shape.offset(layer, 0), 12 * of_layer.num_bytes
        content = node.memory.content[at : at + num_bytes]
        return list(content.reshape(of_layer.num_planes, 12, of_layer.piece_bytes))

    copier, network = Copier(planes_of), LoopbackNetwork()
    nodes += [_DeviceNode(name, network, copier) for name in "pd"]
    prefill, decode = nodes
    blocks = {1: 7, 4: 8, 5: 2}
    before = decode.memory.content.copy()
    ticket = Ticket(
        attempt=AttemptId("r", 0),
        decode_node=decode.me,
        kv_endpoint=decode.connector.endpoint,
        lease_token=5,
        generation=1,
        target_block_ids=tuple(blocks),
        num_cached_tokens=0,
        fingerprint=OF_TWO_KINDS.fingerprint,
        lease_s=30.0,
    )
    try:
        decode.connector.expect(ticket, sender_deadline_s=30)
        prefill.connector.open(ticket, deadline_s=30)
        for layer in range(2):
            prefill.connector.push(
                5, layer=layer, ordinals=range(3), source_blocks=list(blocks.values())
            )
        prefill.connector.commit(5, commit_for(ticket, OF_TWO_KINDS))
        assert isinstance(decode.inbox.get(timeout=WAIT_S), Landed)
    finally:
        for node in nodes:
            node.connector.close()
        copier.close()
    places = [(layer, plane) for layer, planes in ((0, 2), (1, 1)) for plane in range(planes)]
    for layer, plane in places:
        for there, here in blocks.items():
            landed = decode.piece(layer, plane, there)
            assert np.array_equal(landed, prefill.piece(layer, plane, here))
            landed[:] = before[decode.shape.offset(layer, plane, there) :][: landed.size]
    assert np.array_equal(decode.memory.content, before)  # Nothing else was touched.
