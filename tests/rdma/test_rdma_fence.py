"""The effect of a fence on writes in flight, on a wire that loses packets."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kv_transfer.lanes.lane import Broken, Ready
from tests.rdma.devices import Wire, engine_of, needs_rdma, wait_until
from tests.rdma.two_lanes import ALL_BLOCKS, ALL_SLABS, BLOCKS_PER_SLAB, LAYOUT, End
from tests.support.clocks.stall_free_clock import timed

pytestmark = needs_rdma
OLD, NEW_OWNER, NEXT = 7, 0xAB, 9


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    sender, receiver = End(0, OLD), End(1, 0)
    sender.connect(receiver)
    sender.write(receiver, (0,))
    assert isinstance(sender.wait_ready(), Ready)
    receiver.pool[:] = 0
    yield sender, receiver
    sender.lane.close()
    receiver.lane.close()


@pytest.mark.covers("F14", "F69")
def test_a_late_write_after_a_fence_changes_nothing(ends: tuple[End, End], wire: Wire) -> None:
    """The writer does not know, tries again for seconds, and looks up what it can."""
    sender, receiver = ends
    wire.cut()
    sender.write(receiver)
    wire.wait_loss()
    for slab in ALL_SLABS:
        receiver.lane.move(slab)
        receiver.lane.fence(slab)
    receiver.pool[:] = NEW_OWNER
    wire.heal()
    assert isinstance(sender.wait_ready(), Broken)
    assert receiver.holds(NEW_OWNER)

    # It is this writer that was fenced, not the memory: who connects now can write it.
    other = End(2, NEXT)
    other.connect(receiver)
    other.write(receiver)
    assert isinstance(other.wait_ready(), Ready)
    assert receiver.holds(NEXT)
    other.lane.close()


def test_a_new_key_alone_would_not_fence(ends: tuple[End, End], wire: Wire) -> None:
    """The control: with new keys at the old addresses the same late write arrives."""
    sender, receiver = ends
    engine, start = engine_of(1), receiver.pool.ctypes.data
    length = BLOCKS_PER_SLAB * LAYOUT.piece_bytes
    wire.cut()
    sender.write(receiver)
    wire.wait_loss()
    for address in range(start, start + receiver.pool.nbytes, length):
        engine.unregister(address)
        engine.register(address, length)
    receiver.pool[:] = NEW_OWNER
    wire.heal()
    assert isinstance(sender.wait_ready(), Ready)
    assert receiver.holds(OLD)


def test_a_fence_does_not_stop_writers_of_other_slabs(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    mine = ALL_BLOCKS[BLOCKS_PER_SLAB:]
    num_written = 0
    is_over = threading.Event()

    def write_on() -> None:
        nonlocal num_written
        while not is_over.is_set():
            sender.write(receiver, mine)
            assert isinstance(sender.wait_ready(), Ready)
            num_written += 1

    writer = threading.Thread(target=write_on)
    writer.start()
    for _ in range(5):
        before = num_written
        receiver.lane.move(0)
        receiver.lane.fence(0)
        wait_until(lambda before=before: num_written > before + 1, "writes go on")  # type: ignore[misc]
    is_over.set()
    writer.join()
    assert receiver.holds(OLD, mine)
    assert receiver.holds(0, ALL_BLOCKS[:BLOCKS_PER_SLAB])


def test_a_connected_sender_with_the_new_address_writes_where_a_fence_was(
    ends: tuple[End, End],
) -> None:
    """And loses nothing on the way: what it wrote to the old address is there too."""
    sender, receiver = ends
    half = len(ALL_BLOCKS) // 2
    for _ in range(3):
        receiver.pool[:] = 0
        sender.write(receiver, ALL_BLOCKS[:half])
        sender.lane.accept(receiver.peer, receiver.lane.move(0))
        assert isinstance(sender.wait_ready(), Ready)
        receiver.lane.fence(0)
        sender.write(receiver, ALL_BLOCKS[half:])
        assert isinstance(sender.wait_ready(), Ready)
        assert receiver.holds(OLD)


def test_memory_that_is_not_registered(ends: tuple[End, End]) -> None:
    """The write fails soon, and the pair does not use the lane for a while."""
    sender, receiver = ends
    receiver.lane.close()
    sender.write(receiver)
    broken, took_s = timed(sender.wait_ready)
    assert isinstance(broken, Broken)
    assert broken.peer == receiver.peer
    assert took_s < 10
    assert receiver.holds(0)
    assert sender.lane.offer(receiver.peer) is None
