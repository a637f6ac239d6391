"""RDMA in memory: a sender writes the receiver's pool by itself, when the test lets it.

A `Fabric` joins the lanes of a test. `hold` keeps writes under way from then on, as a network may;
each write reads its source when `release` lets it go, and is refused when the memory key that it
was posted with is gone by then. What was held keeps coming, whatever became of its transfer, its
connection or its sender: only a fence stops it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack  # type: ignore[import-untyped]
import numpy as np

from common.errors import HandoffFailed
from kv_transfer.lanes import pieces
from kv_transfer.lanes.lane import Broken, Payload, Ready
from kv_transfer.lanes.pool_memory import Pool, SourceMemory
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.transport import Parts

BLOCKS_PER_SLAB = 4
WAIT_S = 20.0


@dataclass(eq=False, slots=True)
class _Write:
    """One block of one layer, keys and values, in flight."""

    stream: _Stream
    layer: int
    source_block: int
    target_block: int
    key: int
    is_done: bool = False


@dataclass(eq=False, slots=True)
class _Stream:
    """The writes and headers of one lane to one peer, on one connection."""

    lane: FakeOneSidedLane
    peer: Peer
    target: FakeOneSidedLane
    keys: tuple[int, ...]
    queue: deque[_Write | Parts] = field(default_factory=deque)
    is_over: bool = False


class Fabric:
    """Lanes made with the same fabric reach each other's pools. Methods may be called anywhere."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.lanes: dict[int, FakeOneSidedLane] = {}
        self.keys = itertools.count(1)
        self.num_written = 0
        self.num_refused = 0
        self._under_way: deque[_Write] = deque()
        self._is_held = False
        self._num_to_fail = 0

    @property
    def num_under_way(self) -> int:
        """Return the blocks of a layer that were posted and neither written nor refused yet."""
        with self.lock:
            return len(self._under_way)

    def wait_under_way(self, count: int) -> None:
        """Wait until so many blocks are held."""
        with self.lock:
            assert self.lock.wait_for(lambda: len(self._under_way) >= count, WAIT_S)

    def hold(self) -> None:
        """Hold all writes that are posted from now on, until `release`."""
        with self.lock:
            self._is_held = True

    def let_pass(self) -> None:
        """Write at once what is posted from now on; held writes stay."""
        with self.lock:
            self._is_held = False

    def release(self) -> None:
        """Write everything that was held, and hold nothing more."""
        with self.lock:
            self._is_held = False
            self.step(len(self._under_way))

    def step(self, count: int = 1) -> None:
        """Write the oldest `count` held writes."""
        with self.lock:
            for _ in range(min(count, len(self._under_way))):
                self._perform(self._under_way.popleft())

    def fail_next(self, count: int = 1) -> None:
        """Let the next writes fail, without any effect on memory."""
        with self.lock:
            self._num_to_fail = count

    def post(self, write: _Write) -> None:
        with self.lock:
            if not self._is_held:
                self._perform(write)
                return
            self._under_way.append(write)
            self.lock.notify_all()

    def _perform(self, write: _Write) -> None:
        target = write.stream.target
        if not target.is_allowed(write.key) or self._num_to_fail:
            self._num_to_fail -= bool(self._num_to_fail)
            self.num_refused += 1
            write.stream.lane.fail(write.stream, f"block {write.target_block} was not written")
            return
        sources = write.stream.lane.pool.planes(write.layer)
        for plane, source in zip(target.pool.planes(write.layer), sources, strict=True):
            plane[write.target_block] = source[write.source_block]
        self.num_written += 1
        write.is_done = True
        write.stream.lane.advance(write.stream)


class FakeOneSidedLane:
    """See `lane.OneSidedLane`. A lane that failed a write makes no offer until `mend`."""

    name = "rdma"
    blocks_per_slab = BLOCKS_PER_SLAB

    def __init__(self, fabric: Fabric, pool: Pool) -> None:
        self.pool = pool
        self.fences: list[int] = []
        self.num_moved = 0
        self._left: dict[int, int] = {}  # The earlier key of a slab that moves.
        self._fabric = fabric
        num_slabs = -(-pool.num_blocks // BLOCKS_PER_SLAB)
        self.keys = [next(fabric.keys) for _ in range(num_slabs)]
        self._id = next(fabric.keys)
        self._streams: dict[Peer, _Stream] = {}
        self._ready: list[Ready | Broken] = []
        self._is_broken = False
        self.is_full = False
        self._wake: Callable[[], None] = lambda: None
        with fabric.lock:
            fabric.lanes[self._id] = self

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # The sender's end.

    def offer(self, peer: Peer) -> bytes | None:
        return None if self._is_broken or self.is_full else b"fabric"

    def is_full_for(self, peer: Peer) -> bool:
        return self.is_full

    def mend(self) -> None:
        """End the cool-down."""
        self._is_broken = False

    def accept(self, peer: Peer, reply: bytes) -> None:
        target_id, keys = msgpack.unpackb(reply)
        with self._fabric.lock:
            target = self._fabric.lanes.get(target_id)
            if target is None:
                raise HandoffFailed(f"{peer} left the fabric")
            stream = self._streams.get(peer)
            if stream is not None and stream.target is target:
                stream.keys = tuple(keys)  # The reply has new addresses.
                return
            self._streams[peer] = _Stream(self, peer, target, tuple(keys))

    def payload(self, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        if not is_summed:
            return Payload()
        layer, blocks = chunk.layer, chunk.source_blocks
        return Payload(sums=pieces.pool_sums(memory.pool, layer, blocks, chunk.ordinals))

    def write(self, peer: Peer, chunk: LayerChunk, target_blocks: Blocks) -> None:
        with self._fabric.lock:
            stream = self._streams[peer]
            if stream.is_over:
                return
            writes = [
                _Write(stream, chunk.layer, source, target, stream.keys[target // BLOCKS_PER_SLAB])
                for source, target in np.stack((chunk.source_blocks, target_blocks), 1).tolist()
            ]
            stream.queue.extend(writes)
            for write in writes:
                self._fabric.post(write)

    def send_after(self, peer: Peer, parts: Parts) -> None:
        with self._fabric.lock:
            stream = self._streams[peer]
            if not stream.is_over:
                stream.queue.append(parts)
                self.advance(stream)

    def take_ready(self) -> list[Ready | Broken]:
        with self._fabric.lock:
            ready, self._ready = self._ready, []
            return ready

    def forget(self, peer: Peer) -> None:
        with self._fabric.lock:
            stream = self._streams.pop(peer, None)
            if stream is not None:
                stream.is_over = True
                stream.queue.clear()
                self._ready = [one for one in self._ready if one.peer != peer]

    def advance(self, stream: _Stream) -> None:
        """Return the headers whose writes are all done. Called with the fabric's lock."""
        queue = stream.queue
        while queue and not (isinstance(queue[0], _Write) and not queue[0].is_done):
            head = queue.popleft()
            if not isinstance(head, _Write):
                self._ready.append(Ready(stream.peer, head))
                self._wake()

    def fail(self, stream: _Stream, why: str) -> None:
        """Record a refused write. Called with the fabric's lock."""
        if not stream.is_over:
            stream.is_over = True
            stream.queue.clear()
            self._is_broken = True
            self._ready.append(Broken(stream.peer, HandoffFailed(why)))
            self._wake()

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        if offer != b"fabric":
            return None
        packed: bytes = msgpack.packb([self._id, self.keys])
        return packed

    def drop(self, session: bytes) -> None:
        pass

    def move(self, slab: int) -> bytes:
        with self._fabric.lock:
            self.num_moved += 1
            self._left[slab] = self.keys[slab]
            self.keys[slab] = next(self._fabric.keys)
            packed: bytes = msgpack.packb([self._id, self.keys])
            return packed

    def fence(self, slab: int) -> None:
        with self._fabric.lock:
            self.fences.append(slab)
            del self._left[slab]

    def is_allowed(self, key: int) -> bool:
        """Return whether a write that was posted with this key may change memory."""
        return key in self.keys or key in self._left.values()

    def close(self) -> None:
        with self._fabric.lock:
            self.keys = []
            self._left.clear()
            self._streams.clear()
            del self._fabric.lanes[self._id]
