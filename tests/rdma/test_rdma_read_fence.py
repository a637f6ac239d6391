"""The effect of a fence on a read that was given up, on a wire that loses packets."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from common.ids import Incarnation
from kv_transfer.lanes.lane import Copied
from kv_transfer.lanes.pool_memory import Pool, ring_pool
from kv_transfer.lanes.rdma.read_lane import MOST_COOL_DOWN_S, RdmaReadLane
from kv_transfer.lanes.rdma.registered_pool import RegisteredPool
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.pool_shape import PoolShape
from kv_transfer.wire.frames import Data
from tests.rdma.devices import WAIT_S, Wire, engine_of, needs_rdma, wait_until
from tests.rdma.two_lanes import LAYOUT
from tests.support.clocks.manual_clock import ManualClock

pytestmark = needs_rdma
OLD, NEW_OWNER = 7, 0xAB
NUM_SLOTS = 16
TRIED_EVERY_S = 5.0
"""Mooncake uses a device no more after 32 reads in a row that could not begin, and after some that
failed it begins none for `MC_RDMA_RAIL_PAUSE_SECONDS`."""
MINE = (12, 13, 14, 15)
"""The slots for receiving."""


class Ends:
    """A sender's lane on device 0 and a receiver's on device 1, with their rings.

    Engines are those of `first` and the next one: late reads of one test disturb the engines that
    they belong to.
    """

    def __init__(self, first: int) -> None:
        self.source, self.target = _ring(OLD), _ring(0)
        self.clock = ManualClock()
        self.sender = RdmaReadLane(self.source, engine_of(first))
        self.receiver = RdmaReadLane(self.target, engine_of(first + 1), clock=self.clock)
        self._changed = threading.Event()
        self.receiver.attach(self._changed.set)

    def connect(self, session: bytes) -> None:
        offer = self.sender.offer(Peer("tcp://127.0.0.1:1", Incarnation("d", 1)))
        assert offer is not None
        assert self.receiver.open(session, offer) == b""

    def read(self, session: bytes, there: Sequence[int], slots: Sequence[int]) -> None:
        ordinals = tuple(range(len(there)))
        data = Data(0, 1, 1, 0, ordinals, (), tuple(there), b"", False)
        write = Write(session, "rdma_read", "commit", data, as_blocks(slots))
        self.receiver.begin_copy(write, [], self.target)

    def wait_copied(self) -> Copied:
        """Wait for the one read that is under way."""
        deadline_at_s = time.monotonic() + WAIT_S
        while not (copied := self.receiver.take_copied()):
            assert self._changed.wait(deadline_at_s - time.monotonic()), "the read does not end"
            self._changed.clear()
        (one,) = copied
        return one

    def reads_again(self) -> bool:
        """Return whether a read works, which those that fail at a fence hinder for a while."""
        self.clock.advance(MOST_COOL_DOWN_S)
        self.connect(b"next")
        self.read(b"next", [5], MINE[:1])
        return self.wait_copied().error is None

    def holds(self, value: int, slots: Sequence[int] = MINE) -> bool:
        """Return whether all bytes of these slots are `value`."""
        return all(bool(np.all(plane[list(slots)] == value)) for plane in self.target.planes(0))


def _ring(fill: int) -> Pool:
    memory = np.frombuffer(mmap.mmap(-1, PoolShape.ring(LAYOUT, NUM_SLOTS).num_bytes), np.uint8)
    memory[:] = fill
    return ring_pool(memory, LAYOUT)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    ends.connect(b"first")
    ends.read(b"first", [0], MINE[:1])
    assert ends.wait_copied().error is None
    assert ends.holds(OLD, MINE[:1])
    yield ends
    ends.sender.close()
    ends.receiver.close()


@pytest.mark.covers("F14", "F69")
@pytest.mark.parametrize("ends", [100], indirect=True)
def test_a_late_read_after_a_fence_changes_nothing(ends: Ends, wire: Wire) -> None:
    """Its engine has given it up and tries on; the slots are told to be free behind the fence."""
    wire.cut()
    ends.read(b"first", [1, 2, 3, 4], MINE)
    wire.wait_loss()
    assert ends.wait_copied().error is not None
    ends.target.memory.bytes()[:] = NEW_OWNER
    wire.heal()
    fenced = "it is the read that was fenced, not the memory"
    wait_until(ends.reads_again, fenced, every_s=TRIED_EVERY_S)
    assert ends.holds(OLD, MINE[:1])
    assert ends.holds(NEW_OWNER, MINE[1:])


@pytest.mark.parametrize("ends", [102], indirect=True)
def test_without_a_fence_it_would_land(
    ends: Ends, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same read, given up in the same way, into slots that are others'."""
    monkeypatch.setattr(RegisteredPool, "move", lambda self, slab: None)
    monkeypatch.setattr(RegisteredPool, "fence", lambda self, slab: None)
    wire.cut()
    ends.read(b"first", [1, 2, 3, 4], MINE)
    wire.wait_loss()
    assert ends.wait_copied().error is not None
    ends.target.memory.bytes()[:] = NEW_OWNER
    wire.heal()
    wait_until(lambda: ends.holds(OLD), "it lands late")
