"""The lane of every transport: the bytes follow the header of their DATA frame."""

from __future__ import annotations

from kv_transfer.lanes.gather import Gatherer
from kv_transfer.lanes.lane import Payload
from kv_transfer.lanes.piece_rows import PieceRows
from kv_transfer.lanes.pieces import Sums
from kv_transfer.lanes.pool_memory import Pool
from kv_transfer.lanes.source_memory import SourceMemory
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import Limits
from kv_transfer.transport import Parts


class InlineLane:
    """A `lane.CopyingLane`. `name` is the transport's."""

    def __init__(self, name: str, pool: Pool, limits: Limits) -> None:
        """Make the lane. Raises `ValueError` for a pool that is not in host memory."""
        pool.check_on_host(f"lane {name}")
        self.name = name
        self._rows = PieceRows()
        self._gatherer = Gatherer(self._rows, limits.gathered_bytes)

    def offer(self, peer: Peer) -> bytes | None:
        return b""

    def accept(self, peer: Peer, reply: bytes) -> None:
        pass

    def payload(self, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        pool, placed = memory.place(chunk)
        return self._gatherer.payload(pool, placed, is_summed=is_summed)

    def forget(self, peer: Peer) -> None:
        pass

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        return b""

    def copy(self, write: Write, parts: Parts, pool: Pool) -> Sums:
        return self._rows.copy_parts(write, parts, pool)

    def drop(self, session: bytes) -> None:
        pass

    def close(self) -> None:
        pass
