"""The lane that a pair agrees on, what it verifies, and a pair that has no common lane."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from common.errors import HandoffFailed
from kv_transfer.contract import Landed, TransferEnded
from kv_transfer.lanes.lane import LaneFull
from kv_transfer.receiving.connections import Connections
from kv_transfer.receiving.effects import SendBack
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.lanes import LANES_BY_SPEED, VERIFY_MODES, verification
from kv_transfer.transport import FromSession, Parts
from kv_transfer.wire import frames
from tests.support.kv.fake_one_sided_lane import FakeOneSidedLane
from tests.support.kv.kinds import FakeRdmaKind
from tests.support.kv.kv_cluster import (
    LAYOUT,
    Cluster,
    Node,
    commit_for,
    error_of,
    send,
    wait_until,
)
from tests.support.kv.loopback_connector import LoopbackTransport


@pytest.mark.parametrize(
    ("lane", "wanted", "verify"),
    [
        ("zmq", ("auto", "auto"), "block"),
        ("loopback", ("auto", "auto"), "block"),
        ("shm", ("auto", "auto"), "block"),
        ("rdma", ("auto", "auto"), "off"),
        ("rdma_read", ("auto", "auto"), "block"),
        ("rdma_read", ("off", "off"), "commit"),
        ("rdma_read", ("off", "auto"), "block"),
        ("zmq", ("off", "off"), "off"),
        ("zmq", ("off", "auto"), "block"),
        ("zmq", ("commit", "auto"), "block"),
        ("zmq", ("commit", "off"), "commit"),
        ("rdma", ("commit", "auto"), "commit"),
        ("rdma", ("block", "commit"), "block"),
        ("rdma", ("off", "auto"), "off"),
    ],
)
def test_the_stronger_wish_of_both_sides_counts(
    lane: str, wanted: tuple[str, str], verify: str
) -> None:
    assert verification(lane, *wanted) == verify
    assert verification(lane, *reversed(wanted)) == verify


@pytest.mark.parametrize("lane", LANES_BY_SPEED)
@pytest.mark.parametrize("mode", VERIFY_MODES)
def test_what_was_agreed_is_what_either_side_computes(lane: str, mode: str) -> None:
    """WELCOME carries the agreement; applied to it again, the rule changes nothing."""
    agreed = verification(lane, mode, "auto")
    assert verification(lane, agreed, mode) == agreed
    assert VERIFY_MODES.index(agreed) >= VERIFY_MODES.index(mode)


@pytest.fixture
def kind() -> FakeRdmaKind:
    return FakeRdmaKind()


@pytest.fixture
def cluster(kind: FakeRdmaKind) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(kind)) as cluster:
        yield cluster


def handoff(cluster: Cluster, prefill: Node, decode: Node) -> None:
    """Run a handoff that lands."""
    ticket = cluster.ticket(decode, [1, 2, 3])
    send(prefill, decode, ticket, [4, 5, 6])
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool[:, :, [1, 2, 3]], prefill.pool[:, :, [4, 5, 6]])


def lanes_of(node: Node) -> dict[str, str]:
    return dict(node.connector.statistics().lanes)


def hand_over_until_rdma(cluster: Cluster, prefill: Node, decode: Node) -> None:
    """Hand over until the pair has agreed on the fastest lane."""
    wait_until(
        lambda: lanes_of(prefill) == {"d": "rdma"}, lambda: handoff(cluster, prefill, decode)
    )


def test_the_fastest_lane_that_both_can_do(cluster: Cluster) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    handoff(cluster, prefill, decode)
    assert lanes_of(prefill) == {"d": "rdma"}


@pytest.mark.parametrize("who", ["the sender offers nothing", "the receiver cannot"])
def test_the_next_lane_where_one_cannot(
    cluster: Cluster, kind: FakeRdmaKind, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if who == "the sender offers nothing":
        monkeypatch.setattr(FakeOneSidedLane, "offer", lambda self, peer: None)
    else:
        monkeypatch.setattr(FakeOneSidedLane, "open", lambda self, session, offer: None)
    prefill, decode = cluster.node("p"), cluster.node("d")
    handoff(cluster, prefill, decode)
    assert lanes_of(prefill) == {"d": "loopback"}
    assert kind.fabric.num_written == 0


def test_a_pair_with_no_lane_in_common_fails_typed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver does not know the sender's lane, as if that were of a later release."""
    hello = Sender.hello

    def of_a_later_release(self: Sender, *args: Any) -> frames.Hello:
        return dataclasses.replace(hello(self, *args), offers={"teleport": b""})

    monkeypatch.setattr(Sender, "hello", of_a_later_release)
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(decode, [1])
    prefill.connector.open(ticket, deadline_s=30)
    error = error_of(prefill.wait_event())
    assert "d#1 supports none of the offered lanes" in str(error)
    assert decode.connector.statistics().sessions_open == 0


@pytest.mark.parametrize("lane", ["teleport", "shm", "", "rdma"])
def test_a_lane_that_was_not_offered_is_not_taken(
    cluster: Cluster, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie_in_welcome(monkeypatch, lane=lane)
    if lane == "rdma":
        monkeypatch.setattr(FakeOneSidedLane, "offer", lambda self, peer: None)
    prefill, decode = cluster.node("p"), cluster.node("d")
    untouched = decode.pool.copy()
    ticket = cluster.ticket(decode, [1])
    send(prefill, decode, ticket, [4])
    error = error_of(prefill.wait_event())
    assert error.code == "peer_protocol_error"
    assert f"chose lane {lane!r}, which was not offered" in str(error)
    assert np.array_equal(decode.pool, untouched)


def test_less_verification_than_was_asked_for_is_not_taken(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie_in_welcome(monkeypatch, verify="off")
    prefill, decode = cluster.node("p", verify="commit"), cluster.node("d")
    send(prefill, decode, cluster.ticket(decode, [1]), [4])
    error = error_of(prefill.wait_event())
    assert error.code == "peer_protocol_error"
    assert "chose to verify 'off': wanted 'commit' or more" in str(error)


def lie_in_welcome(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    welcome = Connections.welcome

    def lie(self: Connections, session: Any) -> SendBack:
        reply = welcome(self, session)
        assert isinstance(reply.frame, frames.Welcome)
        return SendBack(reply.session, dataclasses.replace(reply.frame, **changes))  # type: ignore[arg-type]

    monkeypatch.setattr(Connections, "welcome", lie)


def test_a_lane_that_cannot_be_taken_after_all_gives_way(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accept` fails, the lane makes no offer for a while, and the pair goes on without it."""

    def fail(self: FakeOneSidedLane, peer: Peer, reply: bytes) -> None:
        self._is_broken = True
        raise HandoffFailed("no route")

    monkeypatch.setattr(FakeOneSidedLane, "accept", fail)
    prefill, decode = cluster.node("p"), cluster.node("d")
    handoff(cluster, prefill, decode)
    assert lanes_of(prefill) == {"d": "loopback"}


@pytest.mark.covers("F28")
def test_a_write_that_failed_falls_back_until_the_lane_is_mended(
    cluster: Cluster, kind: FakeRdmaKind
) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    kind.fabric.fail_next()
    ticket = cluster.ticket(decode, [1, 2, 3])
    send(prefill, decode, ticket, [4, 5, 6])
    # What was written on the connection that broke can still come, so the landing ends with it.
    assert "broke while it wrote" in str(error_of(prefill.wait_event()))
    assert "broke while it wrote" in str(decode.wait_failed())
    handoff(cluster, prefill, decode)
    assert lanes_of(prefill) == {"d": "loopback"}
    kind.one_sided[0].mend()
    # The connection is up all the time; it is taken up anew for the better lane.
    hand_over_until_rdma(cluster, prefill, decode)
    handoff(cluster, prefill, decode)
    assert lanes_of(prefill) == {"d": "rdma"}


def test_a_pair_that_falls_back_says_and_counts_it_once_and_tries_again(
    cluster: Cluster, kind: FakeRdmaKind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.kv_transfer")
    prefill, decode = cluster.node("p"), cluster.node("d")

    def fallbacks() -> dict[tuple[str, str], int]:
        counts = prefill.connector.statistics().measured.fallbacks
        return {key: count for key, count in counts.items() if count}

    handoff(cluster, prefill, decode)
    assert fallbacks() == {}
    for number in (1, 2):
        kind.fabric.fail_next()
        send(prefill, decode, cluster.ticket(decode, [1, 2, 3]), [4, 5, 6])
        assert "broke while it wrote" in str(error_of(prefill.wait_event()))
        decode.wait_failed()
        for _ in range(3):
            handoff(cluster, prefill, decode)
        assert lanes_of(prefill) == {"d": "loopback"}
        assert fallbacks() == {("rdma", "write_failed"): number}
        said = [line for line in caplog.messages if "goes over loopback: rdma" in line]
        assert len(said) == number
        assert "d#1" in said[-1]
        # Its rest is over: no handoff has to ask for it.
        kind.one_sided[0].mend()
        hand_over_until_rdma(cluster, prefill, decode)
    assert fallbacks() == {("rdma", "write_failed"): 2}
    assert len([line for line in caplog.messages if "is offered again" in line]) == 2


def test_a_pair_that_never_agreed_on_a_lane_says_so_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeOneSidedLane, "open", lambda self, session, offer: None)
    prefill, decode = cluster.node("p"), cluster.node("d")
    for _ in range(3):
        handoff(cluster, prefill, decode)
    assert prefill.connector.statistics().measured.fallbacks["rdma", "not_agreed"] == 1
    assert sum("rdma was not agreed on" in line for line in caplog.messages) == 1


def test_a_pair_for_which_a_lane_has_no_room_says_so_once_and_has_it_later(
    cluster: Cluster, kind: FakeRdmaKind, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = cluster.node("p"), cluster.node("d")
    kind.one_sided[0].is_full = True
    for _ in range(3):
        handoff(cluster, prefill, decode)
    assert lanes_of(prefill) == {"d": "loopback"}
    fallbacks = prefill.connector.statistics().measured.fallbacks
    assert {key for key, count in fallbacks.items() if count} == {("rdma", "full")}
    assert fallbacks["rdma", "full"] == 1
    assert sum("rdma has as many peers as it can have" in line for line in caplog.messages) == 1
    kind.one_sided[0].is_full = False
    hand_over_until_rdma(cluster, prefill, decode)


def test_a_lane_that_filled_up_while_it_was_agreed_on_counts_once_as_full(
    cluster: Cluster, kind: FakeRdmaKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_room(self: FakeOneSidedLane, peer: Peer, reply: bytes) -> None:
        self.is_full = True
        raise LaneFull("1 peers are written to already")

    monkeypatch.setattr(FakeOneSidedLane, "accept", has_no_room)
    prefill, decode = cluster.node("p"), cluster.node("d")
    handoff(cluster, prefill, decode)
    fallbacks = prefill.connector.statistics().measured.fallbacks
    assert {key: count for key, count in fallbacks.items() if count} == {("rdma", "full"): 1}


VERIFY = [("loopback", mode) for mode in VERIFY_MODES] + [("rdma", mode) for mode in VERIFY_MODES]


def corrupt_one_byte(monkeypatch: pytest.MonkeyPatch, decode: Node, at: int) -> None:
    """Corrupt the second DATA frame that carries bytes, or the block that it names."""
    count = 0
    arrive = LoopbackTransport.arrive

    def meddle(self: LoopbackTransport, connection: bytes, arrival: object) -> None:
        nonlocal count
        if isinstance(arrival, FromSession):
            arrival = FromSession(arrival.session, flip(arrival.parts))
        arrive(self, connection, arrival)  # type: ignore[arg-type]

    def flip(parts: Parts) -> Parts:
        nonlocal count
        frame = frames.decode(parts[0])
        if not isinstance(frame, frames.Data):
            return parts
        count += 1
        if count != 2:
            return parts
        if len(parts) == 1:
            # The bytes are in the pool already: the ticket's blocks are 1, 2, 3.
            decode.pool[frame.layer, 1, frame.ordinals[0] + 1, at] ^= 1
            return parts
        changed = bytearray(parts[-1])
        changed[at] ^= 1
        return [*parts[:-1], memoryview(changed)]

    monkeypatch.setattr(LoopbackTransport, "arrive", meddle)


@pytest.mark.parametrize(("lane", "verify"), VERIFY)
@pytest.mark.parametrize("at", [0, LAYOUT.piece_bytes - 1])
def test_one_wrong_byte_is_found_unless_nobody_looks(
    cluster: Cluster, lane: str, verify: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lane == "loopback":
        monkeypatch.setattr(FakeOneSidedLane, "offer", lambda self, peer: None)
    prefill, decode = cluster.node("p", verify=verify), cluster.node("d", verify="off")
    corrupt_one_byte(monkeypatch, decode, at)
    ticket = cluster.ticket(decode, [1, 2, 3])
    send(prefill, decode, ticket, [4, 5, 6])
    if verify == "off":
        assert isinstance(decode.wait_event(), Landed)
        wrong = decode.pool[:, :, [1, 2, 3]] != prefill.pool[:, :, [4, 5, 6]]
        assert np.count_nonzero(wrong) == 1
        return
    if verify == "block":  # The sum names the piece, so it comes again.
        assert isinstance(decode.wait_event(), Landed)
        assert np.array_equal(decode.pool[:, :, [1, 2, 3]], prefill.pool[:, :, [4, 5, 6]])
        assert decode.connector.statistics().checksum_failures[lane] == 1
        assert decode.connector.statistics().frames_dropped["damaged"] == 1
        return
    assert "bad checksum" in str(decode.wait_failed())
    assert "bad checksum" in str(error_of(prefill.wait_event()))


@pytest.mark.covers("F23")
@pytest.mark.parametrize("verify", VERIFY_MODES)
def test_what_leaves_again_after_a_reconnect_counts_once(
    cluster: Cluster, kind: FakeRdmaKind, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames arrived and their acknowledgements were lost, so both sides see them twice."""
    monkeypatch.setattr(FakeOneSidedLane, "offer", lambda self, peer: None)
    prefill = cluster.node("p", verify=verify)
    decode = cluster.node("d", verify=verify)
    handoff(cluster, prefill, decode)
    ticket = cluster.ticket(decode, range(8))
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)

    lost = 0
    arrive = LoopbackTransport.arrive

    def lose_answers(self: LoopbackTransport, connection: bytes, arrival: object) -> None:
        nonlocal lost
        if isinstance(arrival, FromSession):
            arrive(self, connection, arrival)
        elif lost < 3:
            lost += 1
            kind.network.cut(decode.connector.endpoint)
        else:
            arrive(self, connection, arrival)  # type: ignore[arg-type]

    monkeypatch.setattr(LoopbackTransport, "arrive", lose_answers)
    prefill.push_all(ticket, range(8))
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool[:, :, :8], prefill.pool[:, :, :8])
    assert lost == 3
    assert decode.connector.statistics().frames_dropped["duplicate"] > 0
