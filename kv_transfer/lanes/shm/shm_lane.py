"""The lane between nodes of one host: DATA frames name blocks, the receiver copies them.

The sender's pool is shared memory that receivers map read-only, and so is the other memory that it
sends from, where it has some (`SourceMemory`). The receiver stays the only writer
of its own pool, so a sender that is late or stops changes no block there: a frame of an old
generation is dropped before memory is touched, as on every lane.

The source may change while it is copied, if its transfer has ended and the receiver does not know
it yet. Such bytes are never landed: a sender sends COMMIT only when every piece was acknowledged,
that is copied, while the blocks were still held for the transfer. The sender computes checksums in
its pool and the receiver of the copied bytes, to find any other error.

When a sender dies, its memory stays readable for receivers that have it mapped. They unmap it when
the session ends, which the sender's silence causes.
"""

from __future__ import annotations

import logging

from common.errors import PeerProtocolError
from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.lane import Payload
from kv_transfer.lanes.pieces import NO_SUMS, PieceRows, Sums
from kv_transfer.lanes.pool_memory import Pool, SourceMemory, host_pool, ring_pool
from kv_transfer.lanes.shm.shared_pool import (
    NotShared,
    SharedPool,
    map_pool,
    pack_offers,
    unpacked_offers,
)
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.transport import Parts

logger = logging.getLogger("pdserve.kv_transfer")


class ShmLane:
    """A `lane.CopyingLane`."""

    name = "shm"

    def __init__(
        self,
        layout: KVLayout,
        shared: SharedPool | None = None,
        host: SharedPool | None = None,
        *,
        is_ring: bool = False,
    ) -> None:
        """Make the lane.

        `shared` holds the connector's own pool or, with `is_ring`, its ring, and `host` what is
        sent beside it; without a pool this end only receives. Raises `ValueError` when one of them
        does not hold whole blocks.
        """
        self._rows = PieceRows()
        self._layout = layout
        self._shared = shared, host  # They are shared as long as they are held.
        self._offer: bytes | None = None
        if shared is not None:
            pool = (ring_pool if is_ring else host_pool)(shared.memory, layout)
            offers = [shared.offer(pool.num_blocks, is_ring=is_ring)]
            if host is not None:
                offers.append(host.offer(host_pool(host.memory, layout).num_blocks))
            self._offer = pack_offers(offers)
        self._source_of: dict[bytes, SourceMemory] = {}

    # The sender's end.

    def offer(self, peer: Peer) -> bytes | None:
        return self._offer

    def accept(self, peer: Peer, reply: bytes) -> None:
        logger.info("KV to %s goes through shared memory", peer)

    def payload(self, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        sums = NO_SUMS
        if is_summed:
            pool, placed = memory.place(chunk)
            sums = self._rows.sums(pool, chunk.layer, placed.source_blocks, chunk.ordinals)
        return Payload(source_blocks=tuple(chunk.source_blocks.tolist()), sums=sums)

    def forget(self, peer: Peer) -> None:
        pass

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        try:
            pools = [map_pool(one, self._layout) for one in unpacked_offers(offer)]
        except NotShared as error:
            logger.info("shared memory was offered and cannot be used: %s", error)
            return None
        self._source_of[session] = SourceMemory(*pools)
        return b""

    def copy(self, write: Write, parts: Parts, pool: Pool) -> Sums:
        self._check_sources(write)
        blocks = as_blocks(write.data.source_blocks)
        source, placed = self._source_of[write.session].place_blocks(blocks)
        return self._rows.copy_blocks(write, source, placed, pool)

    def _check_sources(self, write: Write) -> None:
        """Raise `PeerProtocolError` for blocks that the sender does not share, or of two memories.

        A function of its own: a traceback keeps its frames' variables alive, and the mapped memory
        must be released in time.
        """
        if write.session not in self._source_of:
            raise PeerProtocolError("DATA without shared memory: wanted the sender's pool")
        num_blocks = self._source_of[write.session].num_blocks
        num_pool_blocks = self._source_of[write.session].num_pool_blocks
        first, last = min(write.data.source_blocks), max(write.data.source_blocks)
        if last >= num_blocks:
            num_beside = num_blocks - num_pool_blocks
            beside = f", and {num_beside} beside it" if num_beside else ""
            raise PeerProtocolError(
                f"source block {last}: the sender's pool has {num_pool_blocks}{beside}"
            )
        if first < num_pool_blocks <= last:
            raise PeerProtocolError(
                f"source blocks {first} and {last}: wanted those of one memory, the sender's pool "
                f"has {num_pool_blocks}"
            )

    def drop(self, session: bytes) -> None:
        # The memory is unmapped with the last view of it.
        self._source_of.pop(session, None)

    def close(self) -> None:
        self._source_of.clear()
