"""Bytes of KV that are changed, or written where they must not be, are noticed on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from common.errors import InternalError
from kv_transfer.lanes.rdma.read_fences import ReadFences
from simulator.faults.contents import NUM_LAYERS, Numbers
from tests.unit.simulator.faults.kv.pairs import BLOCK_SIZE, LATENCY_S, SOURCES, Pair

WHILE_S = 100 * LATENCY_S
"""Everything that is sent has arrived by then."""
OTHER = (77,) * BLOCK_SIZE


def opened(lane: str, seed: int = 0) -> Pair:
    """Return a pair that has sent the first of its layers, of which nothing has arrived."""
    pair = Pair(lane, seed)
    pair.open()
    pair.push(0)
    return pair


def pass_time_until(pair: Pair, is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        pair.pass_time(0.05 * LATENCY_S)
    raise AssertionError("it never came to that")


def change_sources(pair: Pair) -> None:
    pair.memories[0].slots[0][SOURCES[0]] = OTHER


def test_a_write_into_a_block_that_belongs_to_another_is_found() -> None:
    pair = opened("rdma")
    pair.pools[1].start_running(pair.targets)
    with pytest.raises(InternalError, match="that it may reuse"):
        pair.pass_time(WHILE_S)


@pytest.mark.parametrize("lane", ["shm", "ipc"])
def test_a_block_that_is_changed_while_it_is_sent_is_found(lane: str) -> None:
    pair = opened(lane)
    change_sources(pair)
    with pytest.raises(InternalError, match="prefill#1 changed blocks that it sends to decode#1"):
        pair.pass_time(WHILE_S)


def test_a_slot_that_holds_something_else_than_its_block_when_it_is_sent_is_found() -> None:
    pair, sent = opened("rdma_read"), Pair().memories[0].read(0, SOURCES)
    ring = pair.sender.ring
    assert ring is not None
    pass_time_until(pair, lambda: ring.slots[0] == sent[0])
    change_sources(pair)
    with pytest.raises(InternalError, match="prefill#1 sends slots with something else in them"):
        pair.pass_time(WHILE_S)


def test_a_slot_that_is_changed_after_it_was_verified_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = opened("rdma_read")
    ring, verify = pair.receiver.ring, pair.receiver.damaged_in
    assert ring is not None

    def then_change(write: Any, parcel: Any, source: Any, values: Numbers) -> frozenset[int]:
        found = verify(write, parcel, source, values)
        ring.slots[ring.slots.index(values[0])] = OTHER
        return found

    monkeypatch.setattr(pair.receiver, "damaged_in", then_change)
    with pytest.raises(InternalError, match="decode#1 copies other bytes than it has verified"):
        pair.pass_time(WHILE_S)


def test_a_read_into_slots_that_were_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fences: ReadFences[Any], read: Any) -> bool:
        fences.end(read)
        return True

    monkeypatch.setattr(ReadFences, "fail", fail)
    with pytest.raises(InternalError, match="decode#1 has slots read into that it has given back"):
        break_while_slots_are_read_into(range(20))


def break_while_slots_are_read_into(seeds: Iterable[int]) -> None:
    for seed in seeds:
        break_while_one_reads(opened("rdma_read", seed))


def break_while_one_reads(pair: Pair) -> None:
    ring = pair.receiver.ring
    assert ring is not None
    pass_time_until(pair, lambda: ring.receiving.num_lent > 0)
    pair.wires.flights.break_between("prefill", "decode")
    pair.pass_time(30.0)


def test_reads_that_fail_are_not_taken_for_such() -> None:
    break_while_slots_are_read_into(range(20))


def test_a_write_for_a_landing_that_was_released_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = opened("rdma")
    pair.pass_time(WHILE_S)
    pair.push(1)
    pair.receiver.revoke(pair.ticket.lease_token)
    monkeypatch.setattr(type(pair.receiver.receiver), "quarantined", {})
    with pytest.raises(InternalError, match=r"decode#1 lets blocks \[.*\] be written that it has"):
        pair.pass_time(WHILE_S)


@pytest.mark.parametrize("lane", ["zmq", "rdma", "rdma_read"])
def test_a_block_that_is_changed_before_it_lands_is_found(lane: str) -> None:
    pair = opened(lane)
    pair.push(1)
    pass_time_until(pair, lambda: all(map(pair.has_written, range(NUM_LAYERS))))
    pair.pass_time(WHILE_S)
    pair.memories[1].slots[1][pair.targets[1]] = OTHER
    pair.commit()
    says = f"decode#1 lands block {pair.targets[1]} with something else in it"
    with pytest.raises(InternalError, match=says):
        pair.pass_time(WHILE_S)
