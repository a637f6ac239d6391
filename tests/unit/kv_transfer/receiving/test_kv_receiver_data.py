"""The receiving machine and DATA: its landing, the location of its bytes, and their sums."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kv_transfer.contract import Commit, KVEvent, Landed, LandingFailed, Released
from kv_transfer.receiving.effects import Dropped, DropReason, Write
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.chunks import BlockSums
from kv_transfer.wire import frames
from tests.support.kv.receiver_events import (
    BEGIN,
    COMMIT,
    LAYOUT,
    LIMITS,
    ME,
    OTHER,
    SENDER,
    P,
    data,
    events,
    hello,
    land,
    receiver,
    ticket,
)


@pytest.mark.parametrize(
    ("verify", "sums"), [("block", b""), ("commit", bytes(16)), ("off", bytes(16))]
)
def test_data_keeps_to_what_was_agreed_of_sums(verify: str, sums: bytes) -> None:
    """A sender that leaves them out would not be verified."""
    machine = Receiver(ME, LAYOUT, LIMITS, num_blocks=4, verify=verify)
    machine.on_expect(ticket(), 10.0, 0.0)
    machine.on_frame(b"a", frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, verify), [], 0.0)
    machine.on_lane(b"a", "zmq", b"")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    frame = dataclasses.replace(data(0, 0), sums=sums)
    effects = machine.on_frame(b"a", frame, [P, P], 0.0)
    assert not any(isinstance(effect, Write) for effect in effects)
    failed, released = events(effects)
    assert isinstance(failed, LandingFailed)
    assert f"agreement to verify: {verify}" in str(failed.error)
    assert released == Released(1)


@pytest.mark.parametrize("may_be_short", [False, True])
@pytest.mark.parametrize(
    ("ordinals", "num_tokens", "lands"), [((0,), 4, True), ((0,), 8, False), ((1,), 4, False)]
)
def test_fewer_blocks_land_where_the_ticket_allows_it_and_they_are_the_first(
    ordinals: tuple[int, ...], num_tokens: int, may_be_short: bool, lands: bool
) -> None:
    machine = receiver(dataclasses.replace(ticket(), may_be_short=may_be_short))
    hello(machine, b"a")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    for ordinal in ordinals:
        land(machine, b"a", 0, ordinal)
    commit = dataclasses.replace(COMMIT, num_pieces=len(ordinals), num_tokens=num_tokens)
    told = events(machine.on_frame(b"a", commit, [], 0.0))
    if may_be_short and lands:
        assert told == [Landed(1, Commit(num_tokens=4, first_token_id=7))]
    elif may_be_short and num_tokens == 4:
        assert told == [], "the first block has not come"
    else:
        failed, released = told
        assert isinstance(failed, LandingFailed)
        assert "short count" in str(failed.error)
        assert released == Released(1)


def test_sums_of_another_number_of_planes_fail_the_landing() -> None:
    machine = Receiver(ME, LAYOUT, LIMITS, num_blocks=4, verify="block")
    machine.on_expect(ticket(), 10.0, 0.0)
    machine.on_frame(b"a", frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "block"), [], 0.0)
    machine.on_lane(b"a", "zmq", b"")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    effects = machine.on_frame(b"a", dataclasses.replace(data(0, 0), sums=bytes(8)), [P, P], 0.0)
    assert not any(isinstance(effect, Write) for effect in effects)
    failed, _ = events(effects)
    assert isinstance(failed, LandingFailed)
    assert "8 bytes of sums for 1 blocks of layer 0, which has 2 planes" in str(failed.error)


def verifying_at_commit() -> Receiver:
    """Return a machine whose landing has begun on a pair that verifies at commit."""
    machine = Receiver(ME, LAYOUT, LIMITS, num_blocks=4, verify="commit")
    machine.on_expect(ticket(), 10.0, 0.0)
    greeting = frames.Hello(SENDER, ME, LAYOUT, {"zmq": b""}, "commit")
    machine.on_frame(b"a", greeting, [], 0.0)
    machine.on_lane(b"a", "zmq", b"")
    machine.on_frame(b"a", BEGIN, [], 0.0)
    return machine


def unsummed(machine: Receiver, seq: int, *ordinals: int) -> Write:
    """Return the write that a DATA frame of these blocks asks for."""
    frame = frames.Data(seq, 1, 3, 0, ordinals, (len(ordinals),), (), b"")
    effects = machine.on_frame(b"a", frame, [len(ordinals) * P] * 2, 0.0)
    (write,) = (effect for effect in effects if isinstance(effect, Write))
    return write


def u64(*sums: int) -> BlockSums:
    return np.array(sums, np.uint64)


@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_piece_that_comes_again_has_the_same_sum(first: int, *, is_changed: bool) -> None:
    """After a reconnect pieces may be gathered in other frames than before, so that one comes again
    with another that did not. The copies may overlap, and nothing says which one ended last.
    """
    machine = verifying_at_commit()
    writes = [unsummed(machine, 0, 0), unsummed(machine, 1, 0, 1)]
    machine.on_written(writes[0], u64(first))
    effects = machine.on_written(writes[1], u64(first + is_changed, 7))
    if is_changed:
        failed, released = events(effects)
        assert isinstance(failed, LandingFailed)
        assert "block 0 of the ticket in layer 0 came again" in str(failed.error)
        assert released == Released(1)
        return
    commit = dataclasses.replace(COMMIT, digest=first + 7)
    assert isinstance(events(machine.on_frame(b"a", commit, [], 0.0))[0], Landed)


@pytest.mark.parametrize(("digest", "ending"), [(17, Landed), (16, LandingFailed)])
def test_the_digest_is_compared_when_the_last_copy_has_ended(
    digest: int, ending: type[KVEvent]
) -> None:
    machine = verifying_at_commit()
    writes = [unsummed(machine, seq, 0, 1) for seq in range(2)]
    machine.on_written(writes[0], u64(10, 7))
    commit = dataclasses.replace(COMMIT, digest=digest)
    assert events(machine.on_frame(b"a", commit, [], 0.0)) == []
    assert isinstance(events(machine.on_written(writes[1], u64(10, 7)))[0], ending)


def test_a_copy_that_ends_damaged_behind_the_commit_is_not_landed() -> None:
    machine = verifying_at_commit()
    writes = [unsummed(machine, seq, 0, 1) for seq in range(2)]
    machine.on_written(writes[0], u64(10, 7))
    machine.on_frame(b"a", dataclasses.replace(COMMIT, digest=17), [], 0.0)
    assert isinstance(events(machine.on_written(writes[1], u64(11, 7)))[0], LandingFailed)


@pytest.mark.parametrize(
    ("lane", "runs", "source_blocks"),
    [
        ("zmq", (), ()),
        ("zmq", (), (0,)),
        ("zmq", (1,), (0,)),
        ("shm", (), ()),
        ("shm", (1,), ()),
        ("shm", (1,), (0,)),
        ("rdma", (1,), ()),
        ("rdma", (), (0,)),
    ],
)
def test_data_says_where_its_blocks_are_as_its_lane_does(
    lane: str, runs: tuple[int, ...], source_blocks: tuple[int, ...]
) -> None:
    """Whatever its parts are: no parts would be right for no runs."""
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a", lane=lane)
    machine.on_frame(b"a", BEGIN, [], 0.0)
    sums = b"" if lane == "rdma" else bytes(16)
    frame = frames.Data(0, 1, 3, 0, (0,), runs, source_blocks, sums)
    effects = machine.on_frame(b"a", frame, [P, P] if runs else [], 0.0)
    assert not any(isinstance(effect, Write) for effect in effects)
    (failed, *_) = events(effects)
    assert isinstance(failed, LandingFailed)
    assert "DATA does not name its blocks" in str(failed.error)


@pytest.mark.covers("F69")
def test_data_counts_for_its_landing_generation_and_connection_alone() -> None:
    """Nothing else passes, however well it is formed."""
    machine = receiver(ticket(), sender_deadline_s=100.0)
    hello(machine, b"a")
    hello(machine, b"b", OTHER)
    machine.on_frame(b"a", BEGIN, [], 0.0)
    reasons: list[DropReason] = []
    for session, token, generation in [(b"a", 1, 2), (b"a", 1, 4), (b"a", 2, 3), (b"b", 1, 3)]:
        seq = len(reasons) if session == b"a" else 0
        frame = dataclasses.replace(data(seq, 0), lease_token=token, generation=generation)
        dropped, *_ = machine.on_frame(session, frame, [P, P], 0.0)
        assert isinstance(dropped, Dropped)
        reasons.append(dropped.reason)
    stale, unknown = DropReason.STALE_GENERATION, DropReason.UNKNOWN_LEASE
    assert reasons == [stale, stale, unknown, DropReason.WRONG_SENDER]
