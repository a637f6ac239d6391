"""The lane by RDMA between nodes whose pools are on cards: both ends.

A card's pool is not registered: what is sent lies in the slots of a ring (`connector.card_ring`),
which is. HELLO says where. A DATA frame names slots, as on the lane `shm`; the receiver reads them
into slots of its own and sums them there, and the connector copies them to the card. A slot of the
sender is free with the acknowledgement that every lane has.

A sender writes nothing, so a receiver depends on itself alone: a frame of an old generation is
dropped before anything is read. What it reads may have changed meanwhile, if its transfer ended and
it does not know yet; as on `shm`, no COMMIT follows then.

A read that fails may land late, into slots that are others' by then: see `read_fences`. Its frame
was not received: the connection begins anew, over another lane, and the sender sends again what was
not acknowledged. The peer is not read from for `COOL_DOWN_S`, then for twice as long each time that
it fails again soon: what an engine has given up disturbs it for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack  # type: ignore[import-untyped]

from common.errors import HandoffFailed, PeerProtocolError
from common.observing.clock import Clock, MonotonicClock
from kv_transfer.lanes.lane import Copied, Payload
from kv_transfer.lanes.pieces import NO_SUMS, PieceRows
from kv_transfer.lanes.pool_memory import Pool, SourceMemory
from kv_transfer.lanes.rdma.batch_queue import BATCHES_PER_WINDOW
from kv_transfer.lanes.rdma.mooncake_engine import RdmaUnavailable
from kv_transfer.lanes.rdma.peer_batches import Engine, PeerBatches
from kv_transfer.lanes.rdma.rdma_lane import (
    CLOSE_WITHIN_S,
    COOL_DOWN_S,
    MAX_NAME_BYTES,
    unpacked,
)
from kv_transfer.lanes.rdma.read_fences import Step
from kv_transfer.lanes.rdma.registered_pool import RegisteredPool
from kv_transfer.lanes.rdma.ring_reads import RingReads, RingSource
from kv_transfer.lanes.rdma.slabs import PlacedPool, RingPart, SlabbedPool, ranges_of
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import DEFAULT_WINDOW_BYTES, receiving_slots
from kv_transfer.shared.pool_shape import PoolShape
from kv_transfer.transport import Parts

logger = logging.getLogger("pdserve.kv_transfer")

VERSION = 1
# Each has a thread, and a queue pair for each pair of devices.
MAX_READERS = 1024
MOST_COOL_DOWN_S = 3600.0
_THE_SLAB = 0


@dataclass(frozen=True, slots=True)
class _Ring:
    """A sender's engine, and its ring, of which the first `num_sending` slots can be read."""

    engine_name: str
    place: PlacedPool
    num_sending: int


@dataclass(frozen=True, slots=True)
class _Rest:
    """A cool-down of a peer's engine."""

    until_s: float
    span_s: float


@dataclass(eq=False, slots=True)
class _Source(RingSource[Write]):
    """A session's sender."""

    ring: _Ring = field(kw_only=True)


class RdmaReadLane:
    """A `lane.LateCopyingLane`. Raises `RdmaUnavailable` when the ring cannot be registered.

    `ring` is this node's, in shared memory. The engine is not closed with the lane.
    """

    name = "rdma_read"

    def __init__(
        self,
        ring: Pool,
        engine: Engine,
        *,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self._ring, self._engine = ring, engine
        self._rows = PieceRows()
        self._batch_bytes = window_bytes // BATCHES_PER_WINDOW
        self._clock = clock or MonotonicClock()
        shape = ring.shape
        num_receiving = receiving_slots(shape.num_blocks)
        num_sending = shape.num_blocks - num_receiving
        self._sending = RegisteredPool(ring, RingPart.of(shape, 0, num_sending), engine)
        try:
            landing = RingPart.of(shape, num_sending, num_receiving)
            self._landing = RegisteredPool(ring, landing, engine)
        except RdmaUnavailable:
            self._sending.close()
            raise
        place = [ring.memory.address, shape.num_blocks, num_sending]
        self._offer: bytes = msgpack.packb([VERSION, engine.name, *place])
        self._reads: RingReads[Write] = RingReads()
        self._source_of: dict[bytes, tuple[_Source, PeerBatches[Write]]] = {}
        self._leaving: list[PeerBatches[Write]] = []
        self._resting: dict[str, _Rest] = {}
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._unfit: list[Copied] = []
        self._ended: list[tuple[_Source, Copied | HandoffFailed]] = []

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # The sender's end.

    def offer(self, peer: Peer) -> bytes | None:
        return self._offer

    def accept(self, peer: Peer, reply: bytes) -> None:
        logger.info("KV to %s is read by RDMA", peer)

    def payload(self, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        slots, sums = chunk.source_blocks, NO_SUMS
        if is_summed:
            sums = self._rows.sums(memory.pool, chunk.layer, slots, chunk.ordinals)
        return Payload(source_blocks=tuple(slots.tolist()), sums=sums)

    def forget(self, peer: Peer) -> None:
        pass

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        ring = self._ring_of(offer)
        if ring is None or not self._landing.is_writable or self._rests(ring.engine_name):
            return None
        self._leaving = [batches for batches in self._leaving if not batches.join(0)]
        if len(self._source_of) + len(self._leaving) >= MAX_READERS:
            return None
        self._leave(session, PeerBatches.end)  # An earlier one's reads may still be under way.
        source = _Source(ring=ring)
        try:
            batches: PeerBatches[Write] = PeerBatches(
                self._engine,
                ring.engine_name,
                lambda _, item: self._on_moved(source, item),
                batch_bytes=self._batch_bytes,
                is_reading=True,
            )
        except HandoffFailed as error:
            logger.warning("no KV is read from %s: %s", ring.engine_name, error)
            return None
        self._source_of[session] = source, batches
        return b""

    def begin_copy(self, write: Write, parts: Parts, pool: Pool) -> None:
        """See `LateCopyingLane`; the target blocks are slots.

        Raises `PeerProtocolError` for slots that the sender does not have.
        """
        if write.session not in self._source_of:
            raise PeerProtocolError("DATA without a ring: wanted the sender's, by RDMA")
        source, batches = self._source_of[write.session]
        slots, there = write.target_blocks, as_blocks(write.data.source_blocks)
        last, num_sending = int(there.max()), source.ring.num_sending
        if last >= num_sending:
            raise PeerProtocolError(f"source slot {last}: the sender's ring has {num_sending}")
        if source.error is not None or not self._landing.is_writable:
            error = source.error or HandoffFailed("this node has no address left to read to")
            self._unfit.append(Copied(write, error=error))
            self._wake()
            return
        mine = LayerChunk(write.data.layer, as_blocks(write.data.ordinals), slots)
        self._reads.begin(source, write)
        batches.add(ranges_of(mine, there, self._landing.placed, source.ring.place))
        batches.tell_after(write)

    def _on_moved(self, source: _Source, item: Write | HandoffFailed) -> None:
        """Sum what was read; called on a thread of `PeerBatches`, or out of `begin_copy`."""
        ended = self._summed(item) if isinstance(item, Write) else item
        with self._lock:
            self._ended.append((source, ended))
        self._wake()

    def _summed(self, write: Write) -> Copied:
        if write.verify == "off":
            return Copied(write)
        layer, ordinals = write.data.layer, as_blocks(write.data.ordinals)
        return Copied(write, self._rows.sums(self._ring, layer, write.target_blocks, ordinals))

    def take_copied(self) -> list[Copied]:
        """See `LateCopyingLane`. Moves and fences slots, which may take some milliseconds."""
        with self._lock:
            ended, self._ended = self._ended, []
        copied, self._unfit = self._unfit, []
        for source, outcome in ended:
            if isinstance(outcome, Copied):
                self._reads.end(source, outcome.write)
                copied.append(outcome)
            else:
                copied += self._fail(source, outcome)
        return copied + self._fence()

    def _fail(self, source: _Source, error: HandoffFailed) -> list[Copied]:
        """Give a sender up; return those of its reads that can reach nothing any more."""
        span_s = self._rest(source.ring.engine_name)
        what = f"RDMA with {source.ring.engine_name}"
        logger.warning("%s failed, not used for %g s: %s", what, span_s, error)
        return [Copied(write, error=why) for write, why in self._reads.fail(source, error)]

    def _fence(self) -> list[Copied]:
        """Do what is due to reads that failed; return those whose slots are free now."""
        copied: list[Copied] = []
        while (step := self._reads.next_step()) is not None:
            if step is Step.MOVE:
                self._landing.move(_THE_SLAB)
                self._reads.moved(is_beside=self._landing.is_writable)
            else:
                self._landing.fence(_THE_SLAB)
                copied += [Copied(write, error=why) for write, why in self._reads.fenced()]
        return copied

    def drop(self, session: bytes) -> None:
        self._leave(session, PeerBatches.stop)

    def close(self) -> None:
        """Stop reading, and remove all keys: nothing lands afterwards."""
        for session in list(self._source_of):
            self.drop(session)
        deadline_at_s = time.monotonic() + CLOSE_WITHIN_S
        for batches in self._leaving:
            if not batches.join(max(0.0, deadline_at_s - time.monotonic())):
                logger.warning("an RDMA read did not end within %g s", CLOSE_WITHIN_S)
        self._landing.close()
        self._sending.close()

    # Both.

    def _leave(self, session: bytes, how: Callable[[PeerBatches[Write]], None]) -> None:
        _, batches = self._source_of.pop(session, (None, None))
        if batches is not None:
            how(batches)
            self._leaving.append(batches)

    def _rest(self, engine_name: str) -> float:
        """Begin a cool-down; return its length in s. One that went well for as long begins anew."""
        now_s = self._clock.now_s()
        recent = (
            (name, rest)
            for name, rest in self._resting.items()
            if now_s < rest.until_s + rest.span_s
        )
        self._resting = dict(recent)
        last = self._resting.get(engine_name)
        span_s = COOL_DOWN_S if last is None else min(2 * last.span_s, MOST_COOL_DOWN_S)
        self._resting[engine_name] = _Rest(now_s + span_s, span_s)
        return span_s

    def _rests(self, engine_name: str) -> bool:
        rest = self._resting.get(engine_name)
        return rest is not None and self._clock.now_s() < rest.until_s

    def _ring_of(self, offer: bytes) -> _Ring | None:
        """Return the ring that is offered; None, whatever `offer` is, if it is none."""
        match unpacked(offer):
            case [int(version), str(name), int(address), int(num_slots), int(num_sending)] if (
                version == VERSION
                and 0 < len(name) <= MAX_NAME_BYTES
                and 0 < address < 1 << 63
                and 0 < num_sending <= num_slots < 1 << 32
            ):
                shape = PoolShape(self._ring.shape.layers, num_slots, is_ring=True)
                if address + shape.num_bytes < 1 << 64:
                    place = PlacedPool(SlabbedPool(shape, num_slots), (address,))
                    return _Ring(name, place, num_sending)
        return None
