"""A lane whose copies are completed later, as a device's engine does it.

A receiver pulls out of the sender's pool; both are in this process. `hold` keeps copies under way
from then on, until the test lets them go: they are done by a thread that is neither connector's.
Without `hold` that thread does each as soon as it can.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable

from common.errors import HandoffFailed, PeerProtocolError
from kv_transfer.lanes.lane import Copied, Payload
from kv_transfer.lanes.pieces import NO_SUMS, Sums, packed_sums, piece_sum
from kv_transfer.lanes.pool_memory import Bytes, Pool, SourceMemory
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.transport import Parts

WAIT_S = 20.0

ContentOf = Callable[[Pool, int], list[Bytes]]
"""Returns each plane of a layer `[num_blocks, piece_bytes]`, which a test may look at."""


class Copier:
    """The engine: its thread does the copies of all lanes, in order. Call `close` at the end."""

    def __init__(self, content_of: ContentOf = Pool.planes) -> None:
        self.content_of = content_of
        self.lanes: dict[bytes, FakeLateLane] = {}
        self.ids = itertools.count(1)
        self.fails_next = False
        self._changed = threading.Condition()
        self._num_begun = self._num_over = self._num_allowed = 0
        self._is_held = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)
        self._thread.start()

    @property
    def num_under_way(self) -> int:
        with self._changed:
            return self._num_begun - self._num_over

    @property
    def num_over(self) -> int:
        """Return how many copies were made or failed."""
        with self._changed:
            return self._num_over

    def hold(self) -> None:
        """Let no copy be done from now on."""
        with self._changed:
            self._is_held, self._num_allowed = True, 0

    def release(self, count: int | None = None) -> None:
        """Let so many held copies be done; None: all, and the later ones too."""
        with self._changed:
            self._num_allowed += count or 0
            self._is_held = count is not None
            self._changed.notify_all()

    def wait_under_way(self, count: int) -> None:
        """Wait until so many copies are held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_begun - self._num_over >= count, WAIT_S)

    def begin(self, copy: Callable[[], None]) -> None:
        with self._changed:
            self._num_begun += 1
            self._changed.notify_all()
        self._queue.put(copy)

    def close(self) -> None:
        self.release()
        self._queue.put(None)
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_held or self._num_allowed > 0)
                self._num_allowed -= self._is_held
            copy()
            with self._changed:
                self._num_over += 1
                self._changed.notify_all()


class FakeLateLane:
    """A `lane.LateCopyingLane`."""

    name = "shm"

    def __init__(self, copier: Copier, pool: Pool) -> None:
        self.pool = pool
        self._copier = copier
        self._id = b"pool %d" % next(copier.ids)
        copier.lanes[self._id] = self
        self._source_of: dict[bytes, FakeLateLane] = {}
        self._copied: list[Copied] = []
        self._num_under_way = 0
        self._lock = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self.dropped: list[bytes] = []

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # The sender's end.

    def offer(self, peer: Peer) -> bytes | None:
        return self._id

    def accept(self, peer: Peer, reply: bytes) -> None:
        pass

    def payload(self, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        blocks = tuple(chunk.source_blocks.tolist())
        sums = NO_SUMS
        if is_summed:
            sums = self._sums(memory.pool, chunk.layer, blocks, tuple(chunk.ordinals.tolist()))
        return Payload(source_blocks=blocks, sums=sums)

    def forget(self, peer: Peer) -> None:
        pass

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        source = self._copier.lanes.get(offer)
        if source is None:
            return None
        self._source_of[session] = source
        return b""

    def begin_copy(self, write: Write, parts: Parts, pool: Pool) -> None:
        source = self._source_of[write.session].pool
        last = max(write.data.source_blocks)
        if last >= source.num_blocks:
            raise PeerProtocolError(f"source block {last}: the pool has {source.num_blocks}")
        with self._lock:
            self._num_under_way += 1
        self._copier.begin(lambda: self._copy(write, source, pool))

    def take_copied(self) -> list[Copied]:
        with self._lock:
            copied, self._copied = self._copied, []
            return copied

    def drop(self, session: bytes) -> None:
        self.dropped.append(session)
        self._source_of.pop(session, None)

    def close(self) -> None:
        with self._lock:
            assert self._lock.wait_for(lambda: not self._num_under_way, WAIT_S)
        self._source_of.clear()

    # The copier's thread.

    def _copy(self, write: Write, source: Pool, pool: Pool) -> None:
        data = write.data
        if self._copier.fails_next:
            self._copier.fails_next = False
            self._over(Copied(write, error=HandoffFailed("the device refused a copy")))
            return
        blocks, targets = as_blocks(data.source_blocks), write.target_blocks
        content_of = self._copier.content_of
        for plane, origin in zip(
            content_of(pool, data.layer), content_of(source, data.layer), strict=True
        ):
            plane[targets] = origin[blocks]
        sums = NO_SUMS
        if write.verify != "off":
            sums = self._sums(pool, data.layer, tuple(targets.tolist()), data.ordinals)
        self._over(Copied(write, sums))

    def _over(self, copied: Copied) -> None:
        with self._lock:
            self._copied.append(copied)
            self._num_under_way -= 1
            self._lock.notify_all()
        self._wake()

    def _sums(
        self, pool: Pool, layer: int, blocks: tuple[int, ...], ordinals: tuple[int, ...]
    ) -> Sums:
        return packed_sums(
            piece_sum(plane[block], layer, ordinal)
            for plane in self._copier.content_of(pool, layer)
            for block, ordinal in zip(blocks, ordinals, strict=True)
        )
