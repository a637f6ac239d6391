"""Bytes that follow their header, or that the receiver copies out of the sender's pool.

Bytes that follow a header are read from the sender's blocks when the header arrives, as late as a
zero-copy send may read them. A pool that is shared with the receiver is read at some moment of the
copy, and can be read after its process has died. A checksum is modelled by a comparison with the
blocks at the time of sending.
"""

from __future__ import annotations

from kv_transfer.receiving.effects import Write
from kv_transfer.sending.effects import SendChunk
from kv_transfer.shared.block_arrays import run_lengths
from kv_transfer.shared.lanes import PULLING_LANES
from simulator.faults.contents import Numbers
from simulator.faults.kv.moving import MovingEnd, Parcel, data_of


class CopiedBlocks:
    """Both ends, in one node."""

    def __init__(self, end: MovingEnd) -> None:
        self._end = end

    def send(self, effect: SendChunk, lane: str) -> None:
        """Send a chunk whose transfer goes on."""
        chunk = effect.chunk
        blocks: list[int] = chunk.source_blocks.tolist()
        is_pulled = lane in PULLING_LANES
        data = data_of(
            effect,
            runs=() if is_pulled else run_lengths(chunk.source_blocks).tolist(),
            source_blocks=blocks if is_pulled else (),
            is_summed=True,
        )
        values = self._end.memory.read(chunk.layer, blocks)
        self._end.send(effect.peer, Parcel(data, blocks, values))

    def write(self, write: Write, parcel: Parcel, source: MovingEnd) -> None:
        """Copy and verify the blocks of a frame that has arrived."""
        end = self._end
        if not end.receiver.may_write(write):
            end.end_write(write, end.receiver.on_unwritten(write))
            return
        if write.lane not in PULLING_LANES:
            values = source.bytes_of(parcel, write.data.layer)
            self._put(write, values)
            self._record(write, parcel, source, values)
            return
        copied: list[Numbers] = []

        def put(values: Numbers) -> bool:
            copied.append(values)
            return self._put(write, values)

        end.flights.begin(
            *(end, end, end),
            take=lambda: source.memory.read(write.data.layer, parcel.blocks),
            put=put,
            on_done=lambda _: self._record(write, parcel, source, copied[0]),
        )

    def _put(self, write: Write, values: Numbers) -> bool:
        self._end.put(write.data.layer, write.target_blocks.tolist(), values)
        return True

    def _record(self, write: Write, parcel: Parcel, source: MovingEnd, values: Numbers) -> None:
        damaged = self._end.damaged_in(write, parcel, source, values)
        self._end.record(write, parcel, damaged)
