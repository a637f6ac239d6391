"""The lane between nodes of one host: DATA frames name blocks, the receiver copies them.

The sender's pool is shared memory that receivers map read-only. The receiver stays the only writer
of its own pool, so nothing that a sender does, late or never, changes a block there: a frame of an
old generation is dropped before memory is touched, as on every lane.

The source may change while it is copied, when its transfer has ended without the receiver knowing
yet. Such bytes are never landed: COMMIT leaves a sender only when every piece was acknowledged,
that is copied, while the blocks were still held for the transfer. Checksums are computed by the
sender in its pool and by the receiver of what it copied: they find what else may go wrong.

A sender that dies leaves its memory readable to those who have it mapped. They let go of it when
the session ends, which its silence brings about.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.errors import PeerProtocolError
from common.kv_layout import KVLayout
from kv_transfer import pieces
from kv_transfer.core.chunks import Chunk
from kv_transfer.core.effects import Peer, Write
from kv_transfer.lane import Payload
from kv_transfer.pieces import Pool, Sums
from kv_transfer.shm.shared_pool import NotShared, SharedPool, map_pool

logger = logging.getLogger("pdserve.kv_transfer")


class ShmLane:
    """See `lane.PullingLane`."""

    name = "shm"

    def __init__(self, layout: KVLayout, shared: SharedPool | None = None) -> None:
        """`shared` holds the connector's own pool; None: this end only receives.

        Raises `ValueError` when it holds something else.
        """
        # Not at the top: numba takes a second to import, and compiles where its cache is empty.
        from kv_transfer.shm import fused_copy

        self._fused = fused_copy
        self._layout = layout
        self._shared = shared
        self._offer: bytes | None = None
        if shared is not None:
            num_blocks, rest = divmod(shared.memory.size, layout.block_bytes)
            if num_blocks == 0 or rest:
                raise ValueError(
                    f"a pool of {shared.memory.size} bytes: wanted blocks of {layout.block_bytes}"
                )
            self._offer = shared.offer(num_blocks)
        self._source_of: dict[bytes, Pool] = {}

    # The sender's end.

    def offer(self, peer: Peer) -> bytes | None:
        return self._offer

    def accept(self, peer: Peer, reply: bytes) -> None:
        logger.info("KV to %s goes through shared memory", peer)

    def sums(self, pool: Pool, chunk: Chunk) -> Sums:
        layer, piece_bytes = chunk.layer, pool.shape[3]
        if not self._fused.can_sum(piece_bytes):
            return pieces.pool_sums(pool, layer, chunk.source_blocks, chunk.ordinals)
        sources = np.array(chunk.source_blocks, np.uint64)
        seeds = _seeds(layer, chunk.ordinals)
        keys, values = (
            self._fused.sum_rows(_address(pool, layer, kind), piece_bytes, sources, seeds).tolist()
            for kind in (0, 1)
        )
        return tuple(keys), tuple(values)

    def payload(self, chunk: Chunk) -> Payload:
        return Payload(source_blocks=chunk.source_blocks)

    def forget(self, peer: Peer) -> None:
        pass

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        try:
            self._source_of[session] = map_pool(offer, self._layout)
        except NotShared as error:
            logger.info("shared memory was offered and cannot be used: %s", error)
            return None
        return b""

    def pull(self, write: Write, pool: Pool) -> Sums:
        self._check_sources(write)
        source = self._source_of[write.session]
        if self._fused.can_copy(pool.ctypes.data, source.shape[3]):
            return self._pull_in_one_pass(write, source, pool)
        kinds = source[write.data.layer]
        parts = [memoryview(kind[block]) for block in write.data.source_blocks for kind in kinds]
        pieces.write(pool, write.data, write.target_blocks, parts)
        if write.verify == "off":
            return pieces.NO_SUMS
        return pieces.pool_sums(pool, write.data.layer, write.target_blocks, write.data.ordinals)

    def _check_sources(self, write: Write) -> None:
        """By itself, since an error keeps what its frames name, and this memory must go in time."""
        num_blocks = self._source_of[write.session].shape[2]
        last = max(write.data.source_blocks)
        if last >= num_blocks:
            raise PeerProtocolError(f"source block {last}: the sender's pool has {num_blocks}")

    def _pull_in_one_pass(self, write: Write, source: Pool, pool: Pool) -> Sums:
        layer = write.data.layer
        blocks = (write.target_blocks, write.data.source_blocks)
        targets, sources = (np.array(column, np.uint64) for column in blocks)
        seeds = _seeds(layer, write.data.ordinals)
        keys, values = (
            self._fused.copy_summed(
                _address(pool, layer, kind),
                _address(source, layer, kind),
                pool.shape[3],
                targets,
                sources,
                seeds,
            ).tolist()
            for kind in (0, 1)
        )
        return tuple(keys), tuple(values)

    def drop(self, session: bytes) -> None:
        # The memory goes with the last view of it.
        self._source_of.pop(session, None)

    def close(self) -> None:
        self._source_of.clear()


def _seeds(layer: int, ordinals: Sequence[int]) -> npt.NDArray[np.uint64]:
    return np.array([pieces.piece_seed(layer, ordinal) for ordinal in ordinals], np.uint64)


def _address(pool: Pool, layer: int, kind: int) -> int:
    """Where the keys (0) or values (1) of a layer begin."""
    return int(pool.ctypes.data) + (2 * layer + kind) * pool.strides[1]
