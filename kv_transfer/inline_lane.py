"""The lane that every transport has: the bytes travel behind the header of their DATA frame."""

from __future__ import annotations

from kv_transfer import pieces
from kv_transfer.core.chunks import Chunk
from kv_transfer.core.effects import Peer
from kv_transfer.gather import Gatherer
from kv_transfer.lane import Payload
from kv_transfer.pieces import Pool, Sums


class InlineLane:
    """See `lane.Lane`. `name` is the transport's."""

    def __init__(self, name: str, pool: Pool) -> None:
        self.name = name
        self._gatherer = Gatherer(pool)

    def offer(self, peer: Peer) -> bytes | None:
        return b""

    def accept(self, peer: Peer, reply: bytes) -> None:
        pass

    def sums(self, pool: Pool, chunk: Chunk) -> Sums:
        return pieces.pool_sums(pool, chunk.layer, chunk.source_blocks, chunk.ordinals)

    def payload(self, chunk: Chunk) -> Payload:
        return self._gatherer.payload(chunk)

    def forget(self, peer: Peer) -> None:
        pass

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        return b""

    def drop(self, session: bytes) -> None:
        pass

    def close(self) -> None:
        pass
