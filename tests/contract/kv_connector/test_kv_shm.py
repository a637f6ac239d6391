"""Cases of the shared-memory lane alone: a source that may change, die, or be described wrongly."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.connector.receiving_end import ReceivingEnd
from kv_transfer.connector.workers import Finish
from kv_transfer.contract import Landed, Released, TransferEnded
from kv_transfer.lanes import pieces
from kv_transfer.lanes.lane import Payload
from kv_transfer.lanes.pool_memory import SourceMemory
from kv_transfer.lanes.shm.shm_lane import ShmLane
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S
from kv_transfer.wire import frames
from kv_transfer.zmq.connector import ZmqConnector
from tests.contract.kv_connector.killed_sender import killed_sender
from tests.contract.kv_connector.raw_sender import RawSender, assert_unknown_block_is_refused
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.kv_cluster import (
    LAYOUT,
    WAIT_S,
    Cluster,
    Node,
    assert_ended_once,
    begin,
    cluster_of,
    commit_for,
    error_of,
    send,
)

# Pieces that are copied and hashed in one pass.
BIG = KVLayout(
    model_digest="m", num_layers=3, num_kv_heads=2, head_dim=64, block_size=8, dtype="float32"
)
BIG_WINDOW_BYTES = 10 * BIG.piece_bytes


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.closing(cluster_of("shm")) as cluster:
        yield cluster


def big_pair(
    cluster: Cluster, *, verify: str = "auto", sender_clock: ManualClock | None = None
) -> tuple[Node, Node]:
    prefill, decode = (
        cluster.node(name, layout=BIG, window_bytes=BIG_WINDOW_BYTES, verify=verify, clock=clock)
        for name, clock in (("p", sender_clock), ("d", None))
    )
    return prefill, decode


@pytest.mark.parametrize("verify", ["auto", "block", "commit", "off"])
@pytest.mark.parametrize("sources", [range(12), (7, 3, 4, 11, 0)], ids=["adjacent", "scattered"])
def test_large_pieces_are_copied_and_hashed_in_one_pass(
    cluster: Cluster, verify: str, sources: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = big_pair(cluster, verify=verify)
    monkeypatch.setattr(pieces, "write_blocks", None)
    targets = [(5 * block + 2) % 12 for block in range(len(sources))]
    wanted = decode.pool.copy()
    wanted[:, :, targets] = prefill.pool[:, :, list(sources)]
    ticket = cluster.ticket(decode, targets)
    send(prefill, decode, ticket, sources)
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool, wanted)
    assert_ended_once(prefill, decode)


@pytest.mark.parametrize("verify", ["block", "commit"])
@pytest.mark.parametrize("kind", [0, 1], ids=["keys", "values"])
def test_what_was_copied_is_what_is_verified(
    cluster: Cluster, verify: str, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source block changes between the sender's sum and the receiver's copy."""
    prefill, decode = big_pair(cluster, verify=verify)
    payload_of = ShmLane.payload
    before = int(prefill.pool[1, kind, 4, 1000])

    def sum_then_change(
        lane: ShmLane, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool
    ) -> Payload:
        payload = payload_of(lane, memory, chunk, is_summed=is_summed)
        if chunk.layer == 1:
            prefill.pool[1, kind, 4, 1000] = before ^ 1
        return payload

    monkeypatch.setattr(ShmLane, "payload", sum_then_change)
    ticket = cluster.ticket(decode, [1, 2, 3])
    send(prefill, decode, ticket, [4, 5, 6])
    assert "bad checksum" in str(decode.wait_failed())
    assert "bad checksum" in str(error_of(prefill.wait_event()))
    assert_ended_once(prefill, decode)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(a copy is about to begin, let it continue): every copy waits in between."""
    begins, goes_on = threading.Event(), threading.Event()
    copy = ShmLane.copy

    def slow(self: ShmLane, *args: Any) -> pieces.Sums:
        begins.set()
        assert goes_on.wait(WAIT_S)
        return copy(self, *args)

    monkeypatch.setattr(ShmLane, "copy", slow)
    yield begins, goes_on
    goes_on.set()


@pytest.mark.covers("F13")
@pytest.mark.parametrize("verify", ["block", "off"])
def test_a_source_that_is_reused_after_its_transfer_ended_is_never_landed(
    cluster: Cluster, held: tuple[threading.Event, threading.Event], verify: str
) -> None:
    """The receiver copies only after the sender gave the blocks to another prompt.

    With and without checksums nothing of it lands.
    """
    begins, goes_on = held
    clock = ManualClock()
    prefill, decode = big_pair(cluster, verify=verify, sender_clock=clock)
    ticket = cluster.ticket(decode, [1, 2, 3])
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=0.5)
    prefill.push_all(ticket, [4, 5, 6])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket, BIG))
    assert begins.wait(WAIT_S)
    prefill.pass_time_until(lambda: prefill.events, clock)
    assert "by the deadline" in str(error_of(prefill.wait_event()))
    prefill.pool[:, :, [4, 5, 6]] ^= 0xFF
    goes_on.set()
    decode.wait_failed()
    assert not any(isinstance(event, Landed) for event in decode.events)
    assert_ended_once(prefill, decode)


@pytest.mark.covers("F14")
def test_a_landing_that_is_revoked_just_before_the_copy_is_not_written(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frame was accepted, and then the blocks went to another landing."""
    copy = ReceivingEnd.copy

    def revoke_first(self: ReceivingEnd, *args: Any) -> Finish:
        self.revoke(ticket.lease_token)
        return copy(self, *args)

    monkeypatch.setattr(ReceivingEnd, "copy", revoke_first)
    prefill, decode, ticket = begin(cluster)
    untouched = decode.pool.copy()
    prefill.push_all(ticket, [4, 5, 6])
    assert "revoked" in str(error_of(prefill.wait_event()))
    assert decode.wait_event() == Released(ticket.lease_token)
    assert np.array_equal(decode.pool, untouched)
    assert_ended_once(prefill, decode)


@pytest.mark.parametrize("block", [4, 2**32 - 1])
def test_a_block_that_the_sender_does_not_have(cluster: Cluster, block: int) -> None:
    """It is refused before memory is touched, and its connection with it."""
    decode = cluster.node("d")
    assert_unknown_block_is_refused(cluster, decode, block)
    assert decode.connector.statistics().sessions_open == 0
    # Nor is the memory kept by the error, whose traceback may live long.
    decode.connector.close()
    assert num_pools_read() == 0


def test_an_offer_that_lies_is_passed_over_for_the_next_lane(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = ShmLane.offer

    def lie(self: ShmLane, peer: Peer) -> bytes:
        fields = msgpack.unpackb(offer(self, peer))
        packed: bytes = msgpack.packb([*fields[:3], b"n" * 16, *fields[4:]])
        return packed

    monkeypatch.setattr(ShmLane, "offer", lie)
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(decode, [1, 2, 3])
    send(prefill, decode, ticket, [4, 5, 6])
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool[:, :, [1, 2, 3]], prefill.pool[:, :, [4, 5, 6]])
    assert list(prefill.connector.statistics().lanes.values()) == ["zmq"]


def test_a_pair_that_may_only_share_memory_and_cannot_is_told_what_is_wanted(
    cluster: Cluster,
) -> None:
    decode = cluster.node("d")
    events: list[Any] = []
    ended = threading.Event()

    def take(event: object) -> None:
        events.append(event)
        ended.set()

    pool = np.zeros((LAYOUT.num_layers, 2, 4, LAYOUT.piece_bytes), np.uint8)
    with contextlib.closing(
        ZmqConnector(
            pool,
            LAYOUT,
            Incarnation("p", 1),
            take,
            lanes=[NowhereToBeSeen(LAYOUT)],
            has_inline=False,
        )
    ) as prefill:
        ticket = cluster.ticket(decode, [1])
        prefill.open(ticket, deadline_s=30)
        assert ended.wait(WAIT_S)
    error = error_of(events[0])
    assert error.code == "handoff_failed"
    assert "d#1 supports none of the offered lanes; shm wants both nodes on one host" in str(error)


class NowhereToBeSeen(ShmLane):
    """An offer as from another host: its process does not exist here."""

    def offer(self, peer: Peer) -> bytes:
        packed: bytes = msgpack.packb([1, 2**22 + 1, 3, b"n" * 16, 4 * LAYOUT.block_bytes, 4])
        return packed


@pytest.mark.covers("F25")
def test_a_sender_that_is_killed_while_its_pool_is_read(
    cluster: Cluster, held: tuple[threading.Event, threading.Event]
) -> None:
    """The mapped memory stays readable; the landing fails typed; the memory is released."""
    (begins, goes_on), clock = held, ManualClock()
    decode = cluster.node("d", layout=BIG, window_bytes=BIG_WINDOW_BYTES, clock=clock)
    ticket = cluster.ticket(decode, [1, 2, 3])
    decode.connector.expect(ticket, sender_deadline_s=60)
    options = {"layout": BIG, "window_bytes": BIG_WINDOW_BYTES}
    with killed_sender(cluster, ticket, [4, 5, 6], layers=[0, 1], **options):
        assert begins.wait(WAIT_S)
        assert num_pools_read() == 1
    goes_on.set()
    decode.pass_time_until(lambda: decode.events, clock)
    assert f"was silent for {DEFAULT_PEER_TIMEOUT_S:g} s" in str(decode.wait_failed())
    # The blocks are free for others, and nothing of the dead process is kept.
    prefill = cluster.node("other", layout=BIG, window_bytes=BIG_WINDOW_BYTES)
    again = cluster.ticket(decode, [1, 2, 3])
    send(prefill, decode, again, [7, 8, 9])
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(again.lease_token, None)
    assert np.array_equal(decode.pool[:, :, [1, 2, 3]], prefill.pool[:, :, [7, 8, 9]])
    assert num_pools_read() == 1
    assert_ended_once(prefill, decode)


def num_pools_read() -> int:
    """Return the number of senders' pools that this process has mapped."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return sum(" r--s " in line and "memfd:pdserve-kv" in line for line in mappings)


@pytest.mark.covers("F65")
def test_sessions_that_end_let_go_of_the_memory(cluster: Cluster) -> None:
    """A sender that reconnects many times is mapped once."""
    decode = cluster.node("d")
    for _ in range(3):
        with contextlib.closing(RawSender(cluster, decode)) as rogue:
            rogue.settle()
            assert num_pools_read() == 1
            rogue.send(frames.Pong())  # Not for a sender to say: the session is over.
            assert isinstance(rogue.answer(), frames.Rejected)
    decode.connector.close()
    assert num_pools_read() == 0
