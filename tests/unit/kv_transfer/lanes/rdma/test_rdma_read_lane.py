"""Both ends of the lane that reads out of rings, on an engine in memory: fences, failures."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterator

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from common.errors import PeerProtocolError
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout, LayerShape
from kv_transfer.lanes.lane import Copied, LateCopyingLane, OneSidedLane
from kv_transfer.lanes.pieces import pool_sums
from kv_transfer.lanes.pool_memory import Pool, SourceMemory, ring_pool
from kv_transfer.lanes.rdma import read_lane
from kv_transfer.lanes.rdma.aliases import Aliases
from kv_transfer.lanes.rdma.mooncake_engine import RdmaUnavailable
from kv_transfer.lanes.rdma.rdma_lane import COOL_DOWN_S
from kv_transfer.lanes.rdma.read_lane import MOST_COOL_DOWN_S, RdmaReadLane
from kv_transfer.lanes.rdma.registered_pool import RegisteredPool
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.pool_shape import PoolShape
from kv_transfer.wire.frames import Data
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.fake_engine import FakeEngine
from tests.support.kv.kv_cluster import wait_until

NUM_SLOTS = 16
NUM_SENDING = 12
"""The last quarter is for what is received."""
OF_ONE_KIND = KVLayout(
    model_digest="m", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
)
OF_TWO_KINDS = KVLayout.of_layers(
    (LayerShape(2, 2, 8), LayerShape(1, 1, 40), LayerShape(2, 2, 8)),
    model_digest="m",
    block_size=4,
    dtype="float32",
)
PEER = Peer("tcp://127.0.0.1:1", Incarnation("d1", 1))
WAIT_S = 20.0
SESSION, OTHER = b"session", b"other"


def ring_of(layout: KVLayout, seed: int) -> Pool:
    memory = np.frombuffer(mmap.mmap(-1, PoolShape.ring(layout, NUM_SLOTS).num_bytes), np.uint8)
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)
    return ring_pool(memory, layout)


class Ends:
    """Two senders and a receiver, each with a ring and an engine of one memory."""

    def __init__(self, layout: KVLayout = OF_ONE_KIND) -> None:
        self.layout = layout
        self.engine, self.clock = FakeEngine("here:1"), ManualClock()
        self.rings = [ring_of(layout, seed) for seed in range(3)]
        self.source, self.second, self.target = self.rings
        self.sender = RdmaReadLane(self.source, self.engine)
        named = FakeEngine("there:2")
        named.regions = self.engine.regions
        self.other = RdmaReadLane(self.second, named)
        self.receiver = RdmaReadLane(self.target, self.engine, clock=self.clock)
        self._changed = threading.Event()
        self.receiver.attach(self._changed.set)

    def connect(self, session: bytes = SESSION) -> bool:
        """Return whether the receiver takes the sender's offer."""
        offer = (self.other if session == OTHER else self.sender).offer(PEER)
        assert offer is not None
        return self.receiver.open(session, offer) == b""

    def write(
        self,
        there: list[int],
        slots: list[int],
        *,
        layer: int = 0,
        verify: str = "block",
        session: bytes = SESSION,
    ) -> Write:
        """Begin to read slots `there` of a sender into `slots`."""
        data = Data(
            seq=0, lease_token=1, generation=1, layer=layer, ordinals=tuple(range(len(there))),
            runs=(), source_blocks=tuple(there), sums=b"", wants_ack=False,
        )  # fmt: skip
        write = Write(session, "rdma_read", verify, data, as_blocks(slots))
        self.receiver.begin_copy(write, [], self.target)
        return write

    def wait_copied(self, count: int = 1) -> list[Copied]:
        copied: list[Copied] = []
        while True:
            copied += self.receiver.take_copied()
            if len(copied) >= count:
                return copied
            assert self._changed.wait(WAIT_S), "no read ended"
            self._changed.clear()

    def wait_failed(self, write: Write) -> None:
        (copied,) = self.wait_copied()
        assert copied.write is write
        assert copied.error is not None

    def holds(self, there: list[int], slots: list[int], layer: int = 0) -> bool:
        planes = zip(self.source.planes(layer), self.target.planes(layer), strict=True)
        return all(np.array_equal(of_source[there], here[slots]) for of_source, here in planes)

    def close(self) -> None:
        self.engine.is_held = False
        self.engine.let_go.release(1000)
        for lane in (self.sender, self.other, self.receiver):
            lane.close()
            lane.close()


@pytest.fixture(params=[OF_ONE_KIND, OF_TWO_KINDS], ids=["one kind of layer", "two kinds"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.close()
    assert ends.engine.regions == {}, "a key was left"


def test_it_is_a_lane_whose_receiver_copies_late() -> None:
    ends = Ends()
    assert isinstance(ends.receiver, LateCopyingLane)
    assert not isinstance(ends.receiver, OneSidedLane)
    ends.close()


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("verify", ["block", "commit", "off"])
def test_slots_are_read_with_their_sums(ends: Ends, layer: int, verify: str) -> None:
    assert ends.connect()
    before = ends.target.memory.bytes().copy()
    write = ends.write([7, 3, 4], [12, 14, 15], layer=layer, verify=verify)
    (copied,) = ends.wait_copied()
    assert copied.write is write
    assert copied.error is None
    assert ends.holds([7, 3, 4], [12, 14, 15], layer)
    ordinals = as_blocks([0, 1, 2])
    wanted = pool_sums(ends.source, layer, as_blocks([7, 3, 4]), ordinals)
    assert copied.sums == (b"" if verify == "off" else wanted)
    for plane in ends.target.planes(layer):
        plane[[12, 14, 15]] = 0
    after = ends.target.memory.bytes()
    assert np.count_nonzero(after != before) <= 3 * ends.layout.layers[layer].num_bytes


def test_a_sender_names_its_slots_and_sums_them(ends: Ends) -> None:
    chunk = LayerChunk(1, as_blocks([5, 6]), as_blocks([2, 9]))
    memory = SourceMemory(ends.source)
    summed = ends.sender.payload(memory, chunk, is_summed=True)
    assert summed.source_blocks == (2, 9)
    assert summed.sums == pool_sums(ends.source, 1, chunk.source_blocks, chunk.ordinals)
    assert (summed.runs, list(summed.parts)) == ((), [])
    assert ends.sender.payload(memory, chunk, is_summed=False).sums == b""


def test_adjacent_slots_are_one_range_of_each_plane(ends: Ends) -> None:
    ends.connect()
    ends.write([2, 3, 4, 8], [12, 13, 14, 15])
    ends.wait_copied()
    assert [len(batch) for batch in ends.engine.batches] == [4]


def test_each_slot_is_registered_once(ends: Ends) -> None:
    """Layers of one kind have the same places."""
    num_bytes = [ring.memory.num_bytes for ring in ends.rings]
    assert sum(ends.engine.regions.values()) == sum(num_bytes)


def test_slots_that_are_sent_from_are_at_no_address_that_is_read_to_after_a_fence(
    ends: Ends,
) -> None:
    ends.connect()
    ends.engine.num_to_lose = 1
    ends.wait_failed(ends.write([1], [12]))
    ends.clock.advance(COOL_DOWN_S)
    ends.connect()
    ends.wait_failed(ends.write([1], [3]))


def test_slots_that_the_sender_does_not_send_from_are_refused(ends: Ends) -> None:
    ends.connect()
    with pytest.raises(PeerProtocolError, match="source slot 12: the sender's ring has 12"):
        ends.write([1, NUM_SENDING], [12, 13])
    with pytest.raises(PeerProtocolError, match="DATA without a ring"):
        ends.write([1], [12], session=OTHER)
    assert ends.engine.batches == []


def fields(**changed: object) -> bytes:
    named = {
        "version": read_lane.VERSION, "name": "x:1", "address": 4096, "slots": 8, "sending": 6,
    }  # fmt: skip
    packed: bytes = msgpack.packb(list((named | changed).values()))
    return packed


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb({"version": 1}),
        fields(version=2),
        fields(name=""),
        fields(name="x" * 257),
        fields(name=7),
        fields(address=0),
        fields(address=-1),
        fields(address=(1 << 63) + 4096),
        fields(slots=0),
        fields(slots=1 << 32),
        fields(sending=0),
        fields(sending=9),
        fields(further=1),
    ],
)
def test_an_offer_that_is_none_is_not_taken(ends: Ends, offer: bytes) -> None:
    assert ends.receiver.open(SESSION, offer) is None
    with pytest.raises(PeerProtocolError):
        ends.write([1], [12])


def test_a_failed_read_cannot_land_late(ends: Ends) -> None:
    """Its slots are told to be free when the address that it knows is gone."""
    ends.connect()
    ends.engine.num_to_lose = 1
    ends.wait_failed(ends.write([1, 2], [12, 13]))
    for plane in ends.target.planes(0):
        plane[:] = 0xAB
    assert ends.engine.num_lost == 1
    assert ends.engine.land_late() == 0
    assert all(np.all(plane == 0xAB) for plane in ends.target.planes(0))
    ends.connect(OTHER)
    ends.write([5], [12], session=OTHER)
    assert ends.wait_copied()[0].error is None
    assert np.array_equal(ends.target.planes(0)[0][12], ends.second.planes(0)[0][5])


def test_without_a_fence_it_would(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the test above would miss."""
    monkeypatch.setattr(RegisteredPool, "move", lambda self, slab: None)
    monkeypatch.setattr(RegisteredPool, "fence", lambda self, slab: None)
    ends.connect()
    ends.engine.num_to_lose = 1
    ends.wait_failed(ends.write([1, 2], [12, 13]))
    assert ends.engine.land_late() == len(ends.target.planes(0))


def test_reads_from_others_go_on_beside_a_failed_one(ends: Ends) -> None:
    """Those that began before end at the earlier address, and the fence waits for them."""
    ends.connect()
    ends.connect(OTHER)
    ends.engine.is_held = True
    beside = ends.write([5, 6], [14, 15], session=OTHER)
    wait_until(lambda: ends.engine.num_under_way)
    ends.engine.is_held = False
    ends.engine.num_to_lose = 1
    failed = ends.write([1], [12])
    wait_until(lambda: ends.engine.num_lost)
    meanwhile = ends.write([7], [13], session=OTHER)
    assert not ends.receiver.take_copied(), "the failed one's slot waits for the fence"
    ends.engine.let_go.release()
    copied = {one.write: one.error for one in ends.wait_copied(3)}
    assert copied[beside] is copied[meanwhile] is None
    assert copied[failed] is not None
    assert ends.engine.land_late() == 0


def test_all_reads_of_a_peer_that_failed_fail_and_it_rests(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ends.connect()
    ends.engine.is_held = True
    writes = [ends.write([one], [12 + one]) for one in range(3)]
    ends.engine.num_to_lose = 1
    ends.engine.let_go.release(3)
    with caplog.at_level(logging.WARNING):
        copied = ends.wait_copied(3)
    assert [one.write for one in copied] == writes
    assert all(one.error is not None for one in copied)
    assert "RDMA with here:1 failed, not used for 30 s" in caplog.text
    later = ends.write([3], [15])
    ends.wait_failed(later)
    assert not ends.connect(), "it rests"
    assert ends.connect(OTHER)
    ends.engine.is_held = False
    ends.clock.advance(COOL_DOWN_S - 0.1)
    assert not ends.connect()
    ends.clock.advance(0.1)
    assert ends.connect()
    ends.write([3], [15])
    assert ends.wait_copied()[0].error is None


def test_a_peer_that_fails_again_rests_for_longer(ends: Ends) -> None:
    """For twice as long, to an hour; if it went well for as long meanwhile, as at first."""

    def fail() -> None:
        assert ends.connect()
        ends.engine.num_to_lose = 1
        ends.wait_failed(ends.write([1], [12]))

    spans = [COOL_DOWN_S * 2**number for number in range(7)] + [MOST_COOL_DOWN_S] * 2
    for span_s in spans:
        fail()
        ends.clock.advance(span_s - 0.1)
        assert not ends.connect()
        ends.clock.advance(0.1)
    ends.clock.advance(MOST_COOL_DOWN_S)
    fail()
    ends.clock.advance(COOL_DOWN_S)
    assert ends.connect()


def test_a_peer_that_cannot_be_reached(ends: Ends) -> None:
    ends.engine.is_reachable = False
    ends.connect()
    ends.wait_failed(ends.write([1], [12]))


def test_a_session_that_comes_again_leaves_its_reads_to_their_end(ends: Ends) -> None:
    ends.connect()
    ends.engine.is_held = True
    first = ends.write([1], [12])
    wait_until(lambda: ends.engine.num_under_way)
    assert ends.connect()
    ends.engine.is_held = False
    second = ends.write([2], [13])
    ends.engine.let_go.release()
    assert {one.write for one in ends.wait_copied(2)} == {first, second}
    assert ends.holds([1, 2], [12, 13])
    ends.receiver.drop(SESSION)
    ends.receiver.drop(SESSION)


@pytest.mark.covers("F148")
def test_a_sender_for_which_no_thread_starts_is_offered_no_read(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another way is agreed on with it; the next session may be read again."""

    def starts_no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", starts_no_thread)
        assert not ends.connect()
    ends.receiver.drop(SESSION)
    assert ends.connect()
    ends.write([1, 2], [13, 14])
    assert ends.wait_copied()[0].error is None
    assert ends.holds([1, 2], [13, 14])


def test_as_many_peers_as_there_may_be(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_lane, "MAX_READERS", 1)
    assert ends.connect()
    assert not ends.connect(OTHER)


def test_a_sender_that_is_left_counts_until_its_last_read_has_ended(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_lane, "MAX_READERS", 2)
    ends.connect()
    ends.engine.is_held = True
    ends.write([1], [12])
    wait_until(lambda: ends.engine.num_under_way)
    assert ends.connect()  # The session comes again.
    assert not ends.connect(OTHER)
    ends.engine.is_held = False
    ends.engine.let_go.release()
    ends.wait_copied()
    wait_until(lambda: ends.connect(OTHER))


def test_a_process_without_addresses_sends_and_does_not_read(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_addresses(self: Aliases) -> int:
        raise OSError("no address is left")

    monkeypatch.setattr(Aliases, "make", out_of_addresses)
    ends.connect()
    ends.connect(OTHER)
    ends.engine.num_to_lose = 1
    ends.wait_failed(ends.write([1], [12]))
    assert not ends.connect(OTHER)
    ends.wait_failed(ends.write([1], [12], session=SESSION))
    sends = ring_of(ends.layout, 9)
    lane = RdmaReadLane(sends, ends.engine)
    assert lane.offer(PEER) is not None
    assert lane.open(SESSION, fields()) is None
    lane.close()


@pytest.mark.parametrize("num_registered", [0, 1, 2, 3])
def test_a_ring_that_cannot_be_registered(num_registered: int) -> None:
    engine = FakeEngine()
    engine.fails_after = num_registered
    with pytest.raises(RdmaUnavailable, match="is the limit of locked memory too low"):
        RdmaReadLane(ring_of(OF_ONE_KIND, 0), engine)
    assert engine.regions == {}


def test_a_ring_that_cannot_be_registered_twice_fences_at_once(ends: Ends) -> None:
    """Reads from others fail with it, and nothing of either lands."""
    ends.connect()
    ends.connect(OTHER)
    ends.engine.is_held = True
    beside = ends.write([5], [15], session=OTHER)
    wait_until(lambda: ends.engine.num_under_way)
    ends.engine.is_held = False
    ends.engine.num_to_lose = 1
    ends.engine.fails_after = 0
    failed = ends.write([1], [12])
    ends.wait_failed(failed)
    ends.engine.let_go.release()
    ends.wait_failed(beside)
    assert ends.engine.land_late() == 0


def test_closing_in_the_middle_of_a_read(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not wait for long, and afterwards nothing lands."""
    monkeypatch.setattr(read_lane, "CLOSE_WITHIN_S", 0.01)
    ends.connect()
    ends.engine.is_held = True
    ends.write([1], [12])
    wait_until(lambda: ends.engine.num_under_way)
    before = ends.target.memory.bytes().copy()
    ends.receiver.close()
    assert "an RDMA read did not end" in caplog.text
    ends.engine.let_go.release()
    wait_until(lambda: not ends.engine.num_under_way)
    assert np.array_equal(ends.target.memory.bytes(), before)
