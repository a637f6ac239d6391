"""Both ends of the RDMA lane on an engine in memory: order, batches, fences, failures."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from common.errors import HandoffFailed, PeerProtocolError
from common.ids import Incarnation
from kv_transfer.lanes.lane import Broken, LaneFull, Ready
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.lanes.rdma import rdma_lane
from kv_transfer.lanes.rdma.mooncake_engine import RdmaUnavailable
from kv_transfer.lanes.rdma.peer_batches import Engine, PeerBatches
from kv_transfer.lanes.rdma.rdma_lane import COOL_DOWN_S, RdmaLane
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.transport import Parts
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.fake_engine import FakeEngine
from tests.support.kv.pool_shapes import kv_pool

NUM_LAYERS, NUM_BLOCKS, PIECE = 2, 8, 64
PEER, OTHER = (Peer(f"tcp://127.0.0.1:{n}", Incarnation(f"d{n}", 1)) for n in (1, 2))
WAIT_S = 20.0
OFFER = msgpack.packb([rdma_lane.VERSION])


def shared_pool(fill: int) -> Bytes:
    memory = np.frombuffer(mmap.mmap(-1, NUM_LAYERS * 2 * NUM_BLOCKS * PIECE), np.uint8)
    pool = memory.reshape(NUM_LAYERS, 2, NUM_BLOCKS, PIECE)
    pool[:] = fill
    return pool


class Ends:
    """A sender and a receiver on one engine, four blocks to a slab."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.clock = ManualClock()
        self.source, self.target = shared_pool(7), shared_pool(0)
        self.sender = RdmaLane(
            kv_pool(self.source),
            self.engine,
            max_slabs=2,
            clock=self.clock,
            window_bytes=16 * PIECE,
        )
        self.receiver = RdmaLane(kv_pool(self.target), self.engine, max_slabs=2)
        self._changed = threading.Event()
        self.sender.attach(self._changed.set)

    def connect(self, peer: Peer = PEER) -> None:
        reply = self.receiver.open(b"session", OFFER)
        assert reply is not None
        self.sender.accept(peer, reply)

    def write(self, blocks: tuple[int, ...], header: bytes = b"header", peer: Peer = PEER) -> None:
        numbers = as_blocks(blocks)
        self.sender.write(peer, LayerChunk(0, numbers, numbers), numbers)
        self.sender.send_after(peer, [memoryview(header)])

    def wait_ready(self, count: int = 1) -> list[Ready | Broken]:
        ready: list[Ready | Broken] = []
        while len(ready) < count:
            ready += self.sender.take_ready()
            assert len(ready) >= count or self._changed.wait(WAIT_S), "nothing became ready"
            self._changed.clear()
        return ready

    def close(self) -> None:
        self.engine.is_held = False
        self.engine.let_go.release(1000)
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()
    assert ends.engine.regions == {}, "a key was left"


def headers(ready: list[Ready | Broken]) -> list[bytes]:
    return [bytes(part) for one in ready if isinstance(one, Ready) for part in one.parts]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_at_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_at_s
        time.sleep(0.001)


def test_a_header_follows_its_bytes(ends: Ends) -> None:
    ends.connect()
    ends.write((1, 2, 5))
    assert headers(ends.wait_ready()) == [b"header"]
    wanted = np.zeros_like(ends.target)
    wanted[0, :, [1, 2, 5]] = 7
    assert np.array_equal(ends.target, wanted)
    assert len(ends.engine.batches) == 1
    assert len(ends.engine.batches[0]) == 4  # Blocks 1 and 2 are one range, of keys and of values.


def test_what_is_queued_goes_out_together_and_in_order(ends: Ends) -> None:
    """While a batch is under way; two at most, each of a quarter of the window, or one chunk."""
    ends.connect()
    ends.engine.is_held = True
    for block in range(8):
        ends.write((block,), b"%d" % block)
    wait_until(lambda: ends.engine.num_under_way >= 1)
    ends.sender.send_after(PEER, [memoryview(b"last")])
    assert ends.sender.take_ready() == []
    ends.engine.let_go.release(100)
    assert headers(ends.wait_ready(9)) == [b"%d" % block for block in range(8)] + [b"last"]
    assert ends.engine.most_under_way <= 2
    assert len(ends.engine.batches) < 8
    for batch in ends.engine.batches:
        assert sum(size for _, _, size in batch) <= 16 * PIECE // 4


def test_a_header_behind_nothing_is_ready_at_once(ends: Ends) -> None:
    ends.connect()
    ends.sender.send_after(PEER, [memoryview(b"abort")])
    assert headers(ends.sender.take_ready()) == [b"abort"]
    ends.write((1,))
    ends.wait_ready()
    ends.sender.send_after(PEER, [memoryview(b"abort")])
    assert headers(ends.wait_ready()) == [b"abort"]


def test_no_header_overtakes_a_write_under_way(ends: Ends) -> None:
    ends.connect()
    ends.engine.is_held = True
    ends.write((1,))
    wait_until(lambda: ends.engine.num_under_way == 1)
    ends.sender.send_after(PEER, [memoryview(b"abort")])
    assert ends.sender.take_ready() == []
    ends.engine.let_go.release(100)
    assert headers(ends.wait_ready(2)) == [b"header", b"abort"]


def test_a_fence_moves_the_slab_and_tells_where(ends: Ends) -> None:
    ends.connect()
    before = dict(ends.engine.regions)
    ends.engine.is_held = True
    ends.write((0, 5))
    wait_until(lambda: ends.engine.num_under_way == 1)
    reply = ends.receiver.move(1)
    assert before.items() < ends.engine.regions.items(), "the old address stays until the fence"
    ends.receiver.fence(1)
    ends.engine.let_go.release(100)
    (broken,) = ends.wait_ready()
    assert isinstance(broken, Broken)
    assert broken.peer == PEER
    assert np.all(ends.target[:, :, 4:] == 0), "a late write arrived"
    assert set(before) - set(ends.engine.regions) == {
        ends.target.ctypes.data + ((layer * 2 + kind) * NUM_BLOCKS + 4) * PIECE
        for layer in range(NUM_LAYERS)
        for kind in (0, 1)
    }
    ends.sender.accept(OTHER, reply)
    ends.write((0, 5), peer=OTHER)
    assert isinstance(ends.wait_ready()[0], Ready)
    assert np.all(ends.target[0, :, 5] == 7)


def test_a_sender_that_is_told_goes_on_without_a_break(ends: Ends) -> None:
    ends.connect()
    ends.engine.is_held = True
    ends.write((5,), b"before")
    wait_until(lambda: ends.engine.num_under_way == 1)
    ends.sender.accept(PEER, ends.receiver.move(1))
    ends.write((6,), b"behind")
    ends.sender.send_after(PEER, [memoryview(b"done")])
    ends.engine.let_go.release(100)
    assert headers(ends.wait_ready(3)) == [b"before", b"behind", b"done"]
    ends.receiver.fence(1)
    ends.engine.is_held = False
    ends.write((7,), b"after")
    assert headers(ends.wait_ready()) == [b"after"]
    assert np.all(ends.target[0, :, [5, 6, 7]] == 7)


@pytest.mark.parametrize("fault", ["memory", "begin", "reach"])
def test_a_write_that_fails_breaks_its_peer_only(ends: Ends, fault: str) -> None:
    if fault == "reach":
        ends.engine.is_reachable = False
    ends.connect()
    ends.engine.can_begin = fault != "begin"
    if fault == "memory":
        ends.receiver.close()
    ends.write((1,), b"1")
    ends.write((2,), b"2")
    assert [type(one) for one in ends.wait_ready()] == [Broken]
    ends.write((3,), b"3")  # Before its connector heard of it.
    assert ends.sender.take_ready() == []
    ends.sender.forget(PEER)
    assert np.all(ends.target == 0)

    assert ends.sender.offer(PEER) is None
    assert not ends.sender.is_full_for(PEER)
    assert ends.sender.offer(OTHER) is not None
    ends.clock.advance(COOL_DOWN_S)
    assert ends.sender.offer(PEER) is not None


def test_a_peer_that_was_forgotten_says_nothing_more(ends: Ends) -> None:
    ends.connect()
    ends.engine.is_held = True
    ends.write((1,))
    wait_until(lambda: ends.engine.num_under_way == 1)
    ends.write((2,))
    ends.sender.forget(PEER)
    ends.connect()
    ends.sender.send_after(PEER, [memoryview(b"of the next connection")])
    ends.engine.let_go.release(100)
    wait_until(lambda: ends.engine.num_under_way == 0)
    assert headers(ends.wait_ready()) == [b"of the next connection"]
    assert np.all(ends.target[0, :, 2] == 0), "what was queued is dropped"


def test_a_writer_that_is_about_to_speak_when_it_is_forgotten_is_not_heard(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had checked already that it runs: its result is not the next connection's."""
    speak: list[Callable[[Parts | HandoffFailed], None]] = []

    class Slow(PeerBatches[Parts]):
        def __init__(
            self,
            engine: Engine,
            name: str,
            on_ready: Callable[[PeerBatches[Parts], Parts | HandoffFailed], None],
            *,
            batch_bytes: int,
        ) -> None:
            speak.append(lambda ready: on_ready(self, ready))
            super().__init__(engine, name, on_ready, batch_bytes=batch_bytes)

    monkeypatch.setattr(rdma_lane, "PeerBatches", Slow)
    ends.connect()
    ends.sender.forget(PEER)
    ends.connect()
    late, now = speak
    late([memoryview(b"of the last connection")])
    late(HandoffFailed("a write of the last connection failed"))
    assert ends.sender.take_ready() == []
    assert ends.sender.offer(PEER) is not None
    now([memoryview(b"of this one")])
    assert headers(ends.wait_ready()) == [b"of this one"]


def test_what_was_ready_is_forgotten_too(ends: Ends) -> None:
    ends.connect()
    ends.sender.send_after(PEER, [memoryview(b"of the last connection")])
    ends.sender.forget(PEER)
    ends.connect()
    assert ends.sender.take_ready() == []


@pytest.mark.covers("F148")
def test_a_writer_whose_thread_does_not_start_costs_its_peer_a_cool_down(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", starts_no_thread)
        with pytest.raises(HandoffFailed, match="new thread"):
            ends.connect()
    assert ends.sender.offer(PEER) is None
    assert not ends.sender.is_full_for(PEER)
    assert ends.sender.offer(OTHER) is not None
    ends.clock.advance(COOL_DOWN_S)
    ends.connect()
    ends.write((1,))
    assert headers(ends.wait_ready()) == [b"header"]


def starts_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_writers_that_are_stuck_count(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_lane, "MAX_WRITERS", 1)
    ends.connect()
    ends.engine.is_held = True
    ends.write((1,))
    wait_until(lambda: ends.engine.num_under_way == 1)
    ends.sender.forget(PEER)
    with pytest.raises(HandoffFailed, match="already"):
        ends.connect(OTHER)
    ends.engine.let_go.release(100)
    wait_until(lambda: ends.engine.num_under_way == 0)


@pytest.mark.covers("F27")
def test_a_peer_that_is_stuck_stops_neither_others_nor_close(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_lane, "CLOSE_WITHIN_S", 0.1)
    ends.connect()
    ends.engine.is_held = True
    ends.write((1,))
    wait_until(lambda: ends.engine.num_under_way == 1)
    ends.engine.is_held = False
    ends.connect(OTHER)
    ends.write((2,), peer=OTHER)
    assert [one.peer for one in ends.wait_ready()] == [OTHER]
    began_at_s = time.monotonic()
    ends.sender.close()
    assert time.monotonic() < began_at_s + 15
    assert ends.engine.num_under_way == 1


def test_closing_lets_what_is_queued_be_written(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_lane, "CLOSE_WITHIN_S", WAIT_S)
    ends.connect()
    ends.write((1,), b"1")
    ends.sender.send_after(PEER, [memoryview(b"abort")])
    ends.sender.close()
    assert headers(ends.sender.take_ready()) == [b"1", b"abort"]


def test_writers_are_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer beyond the limit is not offered the lane until there is room, so no link breaks."""
    monkeypatch.setattr(rdma_lane, "MAX_WRITERS", 2)
    ends.connect()
    ends.connect(Peer("tcp://127.0.0.1:3", Incarnation("d3", 1)))
    assert ends.sender.offer(PEER) is not None
    assert ends.sender.offer(OTHER) is None
    assert ends.sender.is_full_for(OTHER)
    assert not ends.sender.is_full_for(PEER)
    with pytest.raises(LaneFull, match="already"):
        ends.connect(OTHER)
    ends.sender.forget(PEER)
    assert ends.sender.offer(OTHER) is None, "not before the end of its cool-down"

    def is_offered_later() -> bool:
        ends.clock.advance(COOL_DOWN_S)
        return ends.sender.offer(OTHER) is not None

    wait_until(is_offered_later)


def test_a_target_outside_the_peers_pool(ends: Ends) -> None:
    """Whatever a ticket says: other memory of the peer may lie there."""
    ends.connect()
    chunk = LayerChunk(0, as_blocks([0]), as_blocks([1]))
    ends.sender.write(PEER, chunk, as_blocks([NUM_BLOCKS]))
    (broken,) = ends.wait_ready()
    assert isinstance(broken, Broken)
    assert isinstance(broken.error, PeerProtocolError)
    assert ends.engine.batches == []


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xc1",
        msgpack.packb({"name": "x"}),
        msgpack.packb([2, "x:1", 8, 4, [1, 1]]),
        msgpack.packb([1, "", 8, 4, [1, 1]]),
        msgpack.packb([1, "x" * 300, 8, 4, [1, 1]]),
        msgpack.packb([1, "x:1", 0, 0, []]),
        msgpack.packb([1, "x:1", 8, 9, [1]]),
        msgpack.packb([1, "x:1", 8, 4, [1]]),
        msgpack.packb([1, "x:1", 8, 4, [1, 0]]),
        msgpack.packb([1, "x:1", 8, 4, [1, True]]),
        msgpack.packb([1, "x:1", 8, 4, [1, "1"]]),
    ],
)
def test_a_reply_that_says_nothing_sensible(ends: Ends, reply: bytes) -> None:
    with pytest.raises(PeerProtocolError, match="no valid RDMA addresses"):
        ends.sender.accept(PEER, reply)


@pytest.mark.parametrize("offer", [b"", b"\xc1", msgpack.packb([1, 2]), msgpack.packb([2])])
def test_an_offer_that_cannot_be_taken(ends: Ends, offer: bytes) -> None:
    assert ends.receiver.open(b"session", offer) is None


def test_private_memory_is_only_sent_from() -> None:
    engine = FakeEngine()
    pool = np.zeros((NUM_LAYERS, 2, NUM_BLOCKS, 1 << 16), np.uint8)
    lane = RdmaLane(kv_pool(pool), engine)
    offer = lane.offer(PEER)
    assert offer is not None
    assert lane.open(b"session", offer) is None
    lane.close()
    assert engine.regions == {}


def test_memory_that_cannot_be_registered_leaves_no_key() -> None:
    engine = FakeEngine()
    engine.fails_after = 5
    with pytest.raises(RdmaUnavailable, match="locked memory"):
        RdmaLane(kv_pool(shared_pool(0)), engine, max_slabs=2)
    assert engine.regions == {}
