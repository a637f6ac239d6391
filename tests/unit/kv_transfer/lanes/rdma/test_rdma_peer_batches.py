"""The RDMA writer's batches in flight, and how it waits, on the test's engine and clock."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from common.errors import HandoffFailed
from kv_transfer.lanes.rdma import peer_batches
from kv_transfer.lanes.rdma.batch_queue import MAX_BATCH_RANGES
from kv_transfer.lanes.rdma.peer_batches import MAX_SLEEP_S, PeerBatches
from kv_transfer.lanes.rdma.slabs import Ranges
from kv_transfer.transport import Parts
from tests.support.kv.fake_engine import FakeEngine

WAIT_S = 20.0
BATCH_BYTES = 100
S_PER_BYTE = 0.001


class Wire(FakeEngine):
    """An engine whose batches take their time, one after the other, on the test's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.s_per_byte = S_PER_BYTE
        self.sleeps: list[float] = []
        self.while_asleep: Callable[[], None] = lambda: None
        self.began_before_wait: list[int] = []
        self._done_at_s: dict[int, float] = {}
        self._is_free_at_s = 0.0

    def sleep(self, span_s: float) -> None:
        self.sleeps.append(round(span_s, 6))
        self.now_s += span_s
        self.while_asleep()

    def submit(self, peer_name: str, ranges: Ranges) -> int:
        batch = super().submit(peer_name, ranges)
        began_at_s = max(self.now_s, self._is_free_at_s)
        num_bytes = int(ranges[:, 2].sum())
        self._is_free_at_s = self._done_at_s[batch] = began_at_s + num_bytes * self.s_per_byte
        return batch

    def wait(self, batch: int) -> bool:
        self.began_before_wait.append(len(self.batches))
        if self.is_held:
            assert self.let_go.acquire(timeout=WAIT_S)
        self.now_s = max(self.now_s, self._done_at_s[batch])
        self._under_way.pop(batch)
        return True


class Writing:
    """A writer to a peer; `left` are the headers that left, each with the batches begun by then."""

    def __init__(self, wire: Wire, batch_bytes: int = BATCH_BYTES) -> None:
        self.wire = wire
        self.left: queue.Queue[tuple[bytes, int]] = queue.Queue()
        self.writer = PeerBatches(wire, "there:1", self._take, batch_bytes=batch_bytes)

    def _take(self, writer: PeerBatches[Parts], ready: Parts | HandoffFailed) -> None:
        assert not isinstance(ready, HandoffFailed), ready
        self.left.put((bytes(ready[0]), len(self.wire.batches)))

    def put(self, num_bytes: int, header: bytes = b"header") -> None:
        self.writer.add(np.array([(0, 0, num_bytes)], np.uint64))
        self.writer.tell_after([memoryview(header)])

    def wait_left(self) -> tuple[bytes, int]:
        return self.left.get(timeout=WAIT_S)

    def write_alone(self, num_bytes: int) -> float:
        """Return the time that was slept for a write that had the wire for itself."""
        self.wire.sleeps.clear()
        self.put(num_bytes)
        self.wait_left()
        return sum(self.wire.sleeps)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writing]:
    wire = Wire()
    clock = SimpleNamespace(monotonic=lambda: wire.now_s, sleep=wire.sleep)
    monkeypatch.setattr(peer_batches, "time", clock)
    writing = Writing(wire)
    yield writing
    wire.is_held = False
    wire.let_go.release(100)
    writing.writer.end()
    assert writing.writer.join(WAIT_S)


def test_the_next_batches_begin_before_the_headers_of_the_last_leave(writing: Writing) -> None:
    writing.wire.is_held = True
    for header in (b"a", b"b", b"c"):
        writing.put(BATCH_BYTES, header)
    writing.wire.let_go.release(3)
    assert [writing.wait_left() for _ in "abc"] == [(b"a", 3), (b"b", 3), (b"c", 3)]
    assert writing.wire.most_under_way == 2


def test_what_is_queued_while_it_sleeps_begins_before_it_waits(writing: Writing) -> None:
    for _ in range(2):
        writing.write_alone(BATCH_BYTES)
    writing.wire.began_before_wait.clear()

    def queue_more() -> None:
        writing.wire.while_asleep = lambda: None
        writing.put(BATCH_BYTES, b"more")

    writing.wire.while_asleep = queue_more
    writing.put(BATCH_BYTES, b"first")
    assert [writing.wait_left()[0] for _ in range(2)] == [b"first", b"more"]
    assert writing.wire.began_before_wait[0] == 4, "the wire would have idled"


def test_no_batch_is_larger_than_its_bound_unless_one_write_is(writing: Writing) -> None:
    writing.wire.is_held = True
    writing.put(10)
    for num_bytes in (60, 60, 30, 30, 250, 10):
        writing.put(num_bytes)
    writing.wire.let_go.release(100)
    for _ in range(7):
        writing.wait_left()
    sizes = [batch[:, 2].tolist() for batch in writing.wire.batches]
    assert [size for batch in sizes for size in batch] == [10, 60, 60, 30, 30, 250, 10]
    assert all(sum(batch) <= BATCH_BYTES or len(batch) == 1 for batch in sizes), sizes


def test_it_sleeps_half_of_what_a_batch_will_take(writing: Writing) -> None:
    """But not by the first one, which makes the connection too."""
    writing.wire.s_per_byte = 1.0
    assert writing.write_alone(100) == 0
    writing.wire.s_per_byte = S_PER_BYTE
    assert writing.write_alone(100) == 0
    assert writing.write_alone(60) == pytest.approx(0.03)


def test_one_batch_that_was_held_up_says_nothing_of_the_next(writing: Writing) -> None:
    for _ in range(3):
        writing.write_alone(100)
    writing.wire.s_per_byte = 0.1
    assert writing.write_alone(100) == pytest.approx(0.05)
    assert writing.write_alone(100) == pytest.approx(0.05)
    assert writing.write_alone(100) == pytest.approx(MAX_SLEEP_S), "now it is slow, and bounded"


def test_a_writer_that_slept_too_long_sleeps_half_as_long_the_next_time(writing: Writing) -> None:
    for _ in range(3):
        writing.write_alone(100)
    writing.wire.s_per_byte = 0.0
    slept = [writing.write_alone(100) for _ in range(4)]
    assert slept == pytest.approx([0.05, 0.025, 0.0125, 0.00625])


class SlowToReach(FakeEngine):
    """Nothing is begun before `may_begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_begin = threading.Event()

    def can_reach(self, peer_name: str) -> bool:
        return self.may_begin.wait(WAIT_S)


def test_a_writer_that_failed_ends_when_nothing_is_under_way() -> None:
    """After `join` no write of it continues; only the answer frees a batch."""
    engine, said = SlowToReach(), queue.Queue[Parts | HandoffFailed]()
    writer: PeerBatches[Parts] = PeerBatches(
        engine, "there", lambda _, ready: said.put(ready), batch_bytes=BATCH_BYTES
    )
    for _ in range(2):
        writer.add(np.array([(0, 0, BATCH_BYTES)], np.uint64))  # To memory that nobody registered.
    engine.may_begin.set()
    assert isinstance(said.get(timeout=WAIT_S), HandoffFailed)
    assert writer.join(WAIT_S)
    assert len(engine.batches) == 2
    assert engine.num_under_way == 0
    assert said.empty()


def test_no_batch_has_more_ranges_than_the_engine_takes(writing: Writing) -> None:
    """However many are written at once or queued; the header follows the last of them."""
    many = Writing(writing.wire, batch_bytes=1 << 20)
    many.wire.is_held = True
    counts = MAX_BATCH_RANGES // 2 + 1, MAX_BATCH_RANGES // 2, 2 * MAX_BATCH_RANGES + 3
    for count in (1, *counts):
        many.writer.add(np.ones((count, 3), np.uint64))
    many.writer.tell_after([memoryview(b"header")])
    many.wire.let_go.release(100)
    assert many.wait_left()[0] == b"header"
    sizes = [len(batch) for batch in many.wire.batches]
    assert sum(sizes) == 1 + sum(counts)
    assert max(sizes) <= MAX_BATCH_RANGES
    many.writer.end()
    assert many.writer.join(WAIT_S)


class FewSlots(SlowToReach):
    """An engine whose queue holds `num_slots` batches; it refuses what exceeds that."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.num_refused = 0

    def submit(self, peer_name: str, ranges: Ranges) -> int:
        if self.num_under_way == self.num_slots:
            self.num_refused += 1
            return 0
        return super().submit(peer_name, ranges)


def write_forty(engine: FewSlots) -> list[Parts | HandoffFailed]:
    """Return what the writer reports when 40 batches were queued before it began."""
    said = queue.Queue[Parts | HandoffFailed]()
    memory = np.arange(2 * 40 * BATCH_BYTES, dtype=np.uint8)
    here, there = memory.ctypes.data, memory.ctypes.data + 40 * BATCH_BYTES
    engine.register(here, memory.nbytes)
    writer: PeerBatches[Parts] = PeerBatches(
        engine, "there", lambda _, ready: said.put(ready), batch_bytes=BATCH_BYTES
    )
    for index in range(40):
        at = index * BATCH_BYTES
        writer.add(np.array([(here + at, there + at, BATCH_BYTES)], np.uint64))
        writer.tell_after([memoryview(bytes([index]))])
    writer.end()
    engine.may_begin.set()
    assert writer.join(WAIT_S)
    assert engine.num_under_way == 0, "only the answer frees a batch"
    return list(said.queue)


@pytest.mark.covers("F20")
def test_forty_batches_never_fill_a_queue_of_two() -> None:
    engine = FewSlots(num_slots=2)
    said = write_forty(engine)
    assert [bytes(one[0]) for one in said if not isinstance(one, HandoffFailed)] == [
        bytes([index]) for index in range(40)
    ]
    assert len(engine.batches) == 40
    assert engine.num_refused == 0


@pytest.mark.covers("F20")
def test_a_batch_that_the_engine_refuses_ends_the_writer_typed() -> None:
    """No header follows: its link breaks, and what was not acknowledged is sent on another."""
    engine = FewSlots(num_slots=1)
    (error,) = write_forty(engine)
    assert isinstance(error, HandoffFailed)
    assert "a write to there could not be started" in str(error)
    assert len(engine.batches) == 1
    assert engine.num_refused == 1


def test_no_header_leaves_after_the_writer_was_stopped(writing: Writing) -> None:
    """Though its bytes are written: its connection is over."""
    writing.wire.is_held = True
    writing.put(BATCH_BYTES)
    while not writing.wire.began_before_wait:
        pass
    writing.writer.stop()
    writing.wire.let_go.release()
    assert writing.writer.join(WAIT_S)
    assert writing.wire.num_under_way == 0
    assert writing.left.empty()


class Unreachable(SlowToReach):
    """It is found out late that the peer does not answer."""

    def can_reach(self, peer_name: str) -> bool:
        return not super().can_reach(peer_name)


def test_a_failure_after_the_writer_was_stopped_is_not_told() -> None:
    """Its connection is over, and the peer may have another one."""
    engine, said = Unreachable(), queue.Queue[Parts | HandoffFailed]()
    writer: PeerBatches[Parts] = PeerBatches(
        engine, "there", lambda _, ready: said.put(ready), batch_bytes=BATCH_BYTES
    )
    writer.stop()
    engine.may_begin.set()
    assert writer.join(WAIT_S)
    assert said.empty()
