"""The lane by RDMA: both ends.

The receiver registers its pool by slab and sends the addresses. The sender, whose pool is
registered too, writes a chunk to the target blocks and sends the DATA header when the write is
done. So a header that arrives means that its bytes are there, and a control frame that is sent
after the writes means that those before it are over.

A write that fails may continue: the engine retries for a while, and looks up the key that the
memory has then. So a fence registers the memory of a slab at an address that was never used before
and removes the keys of the old one. A writer that knows only the old address can no longer reach
it. Connected senders are sent the new address before (see `core.slab_fences`).

After a failed write a peer is not written to on this lane for `COOL_DOWN_S`, nor is one beyond
`MAX_WRITERS`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]

from common.errors import HandoffFailed, PeerProtocolError
from common.observing.clock import Clock, MonotonicClock
from kv_transfer.lanes.lane import Broken, LaneFull, Payload, Ready
from kv_transfer.lanes.pieces import PieceRows
from kv_transfer.lanes.pool_memory import Pool, SourceMemory
from kv_transfer.lanes.rdma.batch_queue import BATCHES_PER_WINDOW
from kv_transfer.lanes.rdma.peer_batches import Engine, PeerBatches
from kv_transfer.lanes.rdma.registered_pool import RegisteredPool
from kv_transfer.lanes.rdma.slabs import MAX_SLABS, PlacedPool, SlabbedPool, ranges_of, slabbed
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import DEFAULT_WINDOW_BYTES
from kv_transfer.shared.pool_shape import PoolShape
from kv_transfer.transport import Parts

logger = logging.getLogger("pdserve.kv_transfer")

VERSION = 1
COOL_DOWN_S = 30.0
# Each has a thread, and a queue pair for each pair of devices.
MAX_WRITERS = 1024
CLOSE_WITHIN_S = 2.0
MAX_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class _Target:
    """A peer's engine and pool, as its reply describes them."""

    engine_name: str
    place: PlacedPool


@dataclass(frozen=True, slots=True)
class _Rest:
    """A cool-down of a peer; `is_full`: because as many others were written to as can be."""

    until_s: float
    is_full: bool


class RdmaLane:
    """A `lane.OneSidedLane`. Raises `RdmaUnavailable` when the pool cannot be registered.

    A pool in private memory can only be sent from. The engine is not closed with the lane: others
    may use it too.
    """

    name = "rdma"

    def __init__(
        self,
        pool: Pool,
        engine: Engine,
        *,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        max_slabs: int = MAX_SLABS,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._rows = PieceRows()
        self._pool = slabbed(pool.shape, max_slabs=max_slabs)
        self._batch_bytes = window_bytes // BATCHES_PER_WINDOW
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._writers: dict[Peer, tuple[PeerBatches[Parts], _Target]] = {}
        self._leaving: list[PeerBatches[Parts]] = []
        self._ready: list[Ready | Broken] = []
        self._resting: dict[Peer, _Rest] = {}
        self._wake: Callable[[], None] = lambda: None
        self._registered = RegisteredPool(pool, self._pool, engine)

    @property
    def blocks_per_slab(self) -> int:
        return self._pool.blocks_per_slab

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # The sender's end.

    def offer(self, peer: Peer) -> bytes | None:
        rest = self._resting.get(peer)
        if rest is not None and self._clock.now_s() < rest.until_s:
            return None
        if peer not in self._writers and not self._has_room():
            with self._lock:
                self._rest(peer, is_full=True)
            return None
        packed: bytes = msgpack.packb([VERSION])
        return packed

    def is_full_for(self, peer: Peer) -> bool:
        rest = self._resting.get(peer)
        return rest is not None and rest.is_full

    def accept(self, peer: Peer, reply: bytes) -> None:
        """Start a writer; `LaneFull` at `MAX_WRITERS`, `PeerProtocolError` for a bad reply."""
        target = self._read_reply(peer, reply)
        writer, earlier = self._writers.get(peer, (None, None))
        if writer and earlier and earlier.engine_name == target.engine_name:
            self._writers[peer] = writer, target  # The reply has new addresses.
            return
        self.forget(peer)
        if not self._has_room():
            with self._lock:
                self._rest(peer, is_full=True)
            raise LaneFull(f"{MAX_WRITERS} peers are written to already")
        with self._lock:  # It may fail before it is stored here.
            try:
                writer = PeerBatches(
                    self._engine,
                    target.engine_name,
                    lambda writer, ready: self._on_ready(peer, writer, ready),
                    batch_bytes=self._batch_bytes,
                )
            except HandoffFailed:
                self._rest(peer, is_full=False)
                raise
            self._writers[peer] = writer, target

    def payload(self, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        if not is_summed:
            return Payload()
        layer, blocks = chunk.layer, chunk.source_blocks
        return Payload(sums=self._rows.sums(memory.pool, layer, blocks, chunk.ordinals))

    def write(self, peer: Peer, chunk: LayerChunk, target_blocks: Blocks) -> None:
        writer, target = self._writers[peer]
        num_blocks = target.place.pool.num_blocks
        last = int(target_blocks.max())
        if last >= num_blocks:
            writer.stop()
            error = f"target block {last}: {peer} has {num_blocks}"
            self._on_ready(peer, writer, PeerProtocolError(error))
            return
        mine = self._registered.placed
        writer.add(ranges_of(chunk, target_blocks, mine, target.place))

    def send_after(self, peer: Peer, parts: Parts) -> None:
        self._writers[peer][0].tell_after(parts)

    def take_ready(self) -> list[Ready | Broken]:
        with self._lock:
            ready, self._ready = self._ready, []
            return ready

    def forget(self, peer: Peer) -> None:
        with self._lock:
            writer, _ = self._writers.pop(peer, (None, None))
            self._ready = [one for one in self._ready if one.peer != peer]
        if writer is not None:
            writer.stop()
            self._leaving.append(writer)

    def _on_ready(
        self, peer: Peer, writer: PeerBatches[Parts], ready: Parts | HandoffFailed
    ) -> None:
        """Queue a header that may be sent, or a failed write; called on any thread."""
        with self._lock:
            if self._writers.get(peer, (None,))[0] is not writer:
                return
            if isinstance(ready, HandoffFailed):
                self._rest(peer, is_full=False)
                logger.warning("RDMA to %s failed, not used for %g s: %s", peer, COOL_DOWN_S, ready)
                self._ready.append(Broken(peer, ready))
            else:
                self._ready.append(Ready(peer, ready))
        self._wake()

    def _has_room(self) -> bool:
        self._leaving = [writer for writer in self._leaving if not writer.join(0)]
        return len(self._writers) + len(self._leaving) < MAX_WRITERS

    def _rest(self, peer: Peer, *, is_full: bool) -> None:
        """Begin a cool-down. The caller holds the lock: threads of writers begin them too."""
        now_s = self._clock.now_s()
        resting = {one: rest for one, rest in self._resting.items() if rest.until_s > now_s}
        self._resting = resting | {peer: _Rest(now_s + COOL_DOWN_S, is_full)}

    def _read_reply(self, peer: Peer, reply: bytes) -> _Target:
        """Return the target in a peer's reply. Raises `PeerProtocolError`."""
        match unpacked(reply):
            case [int(version), str(name), int(num_blocks), int(blocks_per_slab), [*starts]] if (
                version == VERSION
                and 0 < len(name) <= MAX_NAME_BYTES
                and 0 < blocks_per_slab <= num_blocks < 1 << 32
            ):
                shape = PoolShape(self._pool.shape.layers, num_blocks)
                theirs = SlabbedPool(shape, blocks_per_slab)
                good = [start for start in starts if type(start) is int and 0 < start < 1 << 64]
                if len(good) == len(starts) == theirs.num_slabs:
                    return _Target(name, PlacedPool(theirs, tuple(good)))
        raise PeerProtocolError(f"{peer} sent no valid RDMA addresses: {reply!r:.80}")

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        if unpacked(offer) != [VERSION] or not self._registered.is_writable:
            return None
        return self._reply()

    def _reply(self) -> bytes:
        shape = [self._pool.num_blocks, self._pool.blocks_per_slab]
        starts = self._registered.starts
        packed: bytes = msgpack.packb([VERSION, self._engine.name, *shape, starts])
        return packed

    def drop(self, session: bytes) -> None:
        pass

    def move(self, slab: int) -> bytes:
        self._registered.move(slab)
        return self._reply()

    def fence(self, slab: int) -> None:
        self._registered.fence(slab)

    def close(self) -> None:
        """Stop writing; queued writes may still go on for a moment, see `take_ready`."""
        writers = [writer for writer, _ in self._writers.values()]
        for writer in writers:
            writer.end()
        deadline_at_s = time.monotonic() + CLOSE_WITHIN_S
        for writer in [*writers, *self._leaving]:
            if not writer.join(max(0.0, deadline_at_s - time.monotonic())):
                logger.warning("an RDMA write did not end within %g s", CLOSE_WITHIN_S)
                writer.stop()
        self._registered.close()


def unpacked(message: bytes) -> object:
    """Return the unpacked message, or None, which no valid message is, if it is not msgpack."""
    try:
        return msgpack.unpackb(message, raw=False, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
