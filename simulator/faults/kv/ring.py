"""Blocks that pass through a ring in host memory, as those of a card do.

Other nodes read the slots for sending by RDMA, or their bytes follow a header. Bytes that arrive
are put into slots for receiving, verified there, and copied to the pool. Slots, frames that hold
them and reads in progress are the real ones. Copies between slots and blocks are made beside the
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from common.errors import HandoffFailed, InternalError
from common.ids import Incarnation
from kv_transfer.connector.card_ring import OnCopied
from kv_transfer.connector.frames_to_send import FramesToSend, FrameToSend
from kv_transfer.lanes.lane import Payload
from kv_transfer.lanes.rdma.read_fences import Step
from kv_transfer.lanes.rdma.ring_reads import Failed, RingReads, RingSource
from kv_transfer.receiving.effects import Write
from kv_transfer.sending.effects import SendChunk
from kv_transfer.shared.block_arrays import Blocks, run_lengths
from kv_transfer.shared.lanes import PULLING_LANES, RING_ONLY_LANES
from kv_transfer.shared.limits import receiving_slots
from kv_transfer.shared.ring_slots import Slots
from simulator.faults.contents import Numbers, other_than
from simulator.faults.kv.batches import Batches, OnDone
from simulator.faults.kv.moving import MovingEnd, Parcel, data_of
from simulator.faults.kv.written import REST_S

_BY_READS = PULLING_LANES & RING_ONLY_LANES


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands in for a lane."""

    name: str


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A write to the pool, of a frame that is read into slots."""

    write: Write
    parcel: Parcel
    source: MovingEnd


class _ChangingSlots(Slots):
    """Slots that are overwritten when they are given back, as others may use them from then on.

    So a read that comes too late is found, whether or not others have written there before it.
    """

    def __init__(self, first: int, count: int, values: Numbers) -> None:
        super().__init__(first, count)
        self._values = values

    def give_back(self, slots: Blocks) -> None:
        for slot in slots.tolist():
            self._values[slot] = other_than(self._values[slot])
        super().give_back(slots)


class RingOfSlots:
    """Both ends, in one node. Slots are for a block in one layer."""

    def __init__(self, end: MovingEnd, num_slots: int, block_size: int) -> None:
        self._end = end
        num_receiving = receiving_slots(num_slots)
        self.slots: Numbers = [(0,) * block_size] * num_slots
        num_sending = num_slots - num_receiving
        self.sending = _ChangingSlots(0, num_sending, self.slots)
        self.receiving = _ChangingSlots(num_sending, num_receiving, self.slots)
        stands_in: Any = self
        self.frames = FramesToSend(stands_in, end.sender.is_sending)
        self._reads: RingReads[Write] = RingReads()
        self._arriving: dict[Write, _Arriving] = {}
        self._readers: dict[bytes, tuple[RingSource[Write], Batches[Write]]] = {}
        self._rests_until_s: dict[Incarnation, float] = {}
        self._num_addresses = 1
        self._addresses = [0]
        """Addresses under which slots can be read into; the last is the newest."""

    @property
    def is_idle(self) -> bool:
        """Whether no slot is lent and no frame waits for one."""
        parts = (self.sending, self.receiving)
        return not any(slots.num_lent or slots.num_waiting for slots in parts)

    # The sender's end.

    def send(self, effect: SendChunk, lane: str, *, is_in_pool: bool) -> None:
        """Send a chunk after the earlier ones of its connection, when it is in slots."""
        named: Any = _Named(lane)
        frame = self.frames.add(effect, named)
        if not self._end.sender.is_sending(effect.lease_token):
            self._on_prepared(frame)
        elif is_in_pool or lane in RING_ONLY_LANES:
            self.frames.copy_out(self._copy_out, frame, partial(self._on_copied_out, frame))
        else:
            self._on_prepared(frame)

    def _copy_out(self, layer: int, blocks: Blocks, slots: Blocks, on_copied: OnCopied) -> None:
        end = self._end
        end.flights.begin(
            *(end, end, end),
            take=lambda: end.memory.read(layer, blocks.tolist()),
            put=partial(self._put, slots),
            on_done=lambda _: on_copied(None),
        )

    def slots_at(self, slots: Sequence[int]) -> Numbers:
        """Return the contents of slots."""
        return [self.slots[slot] for slot in slots]

    def _put(self, slots: Blocks, values: Numbers) -> bool:
        for slot, held in zip(slots.tolist(), values, strict=True):
            self.slots[slot] = held
        return True

    def _on_copied_out(self, frame: FrameToSend, is_in_slots: bool, _: object) -> None:
        self._on_prepared(frame)

    def _on_prepared(self, frame: FrameToSend) -> None:
        for ready in self.frames.take_ready(frame, Payload()):
            self._send_prepared(ready)

    def _send_prepared(self, frame: FrameToSend) -> None:
        end, effect = self._end, frame.effect
        if not end.sender.is_sending(effect.lease_token):
            self.frames.give_back(frame)
            end.send_without_bytes(effect)
            return
        chunk, is_in_ring = frame.chunk, self.frames.on_sent(frame)
        if is_in_ring:
            effect = replace(effect, wants_ack=True)
        places: list[int] = chunk.source_blocks.tolist()
        values = end.memory.read(chunk.layer, effect.chunk.source_blocks.tolist())
        if is_in_ring and self.slots_at(places) != values:
            raise InternalError(f"{end.me} sends slots with something else in them")
        is_read = frame.lane.name in _BY_READS
        runs = () if is_read else run_lengths(chunk.source_blocks).tolist()
        data = data_of(effect, runs=runs, source_blocks=places if is_read else (), is_summed=True)
        end.send(effect.peer, Parcel(data, places, values, is_in_ring))

    # The receiver's end.

    def may_read(self, sender: Incarnation) -> bool:
        """Return whether no read from a node has failed lately."""
        return self._end.clock.now_s() >= self._rests_until_s.get(sender, 0.0)

    def write(self, write: Write, parcel: Parcel, source: MovingEnd) -> None:
        """Put the blocks of a frame, which has their bytes or names slots, into the pool."""
        is_read = write.lane in _BY_READS
        values = None if is_read else source.bytes_of(parcel, write.data.layer)

        def on_slots(slots: Blocks) -> None:
            if not self._end.receiver.may_write(write):
                self._end.end_write(write, self._end.receiver.on_unwritten(write))
                self.receiving.give_back(slots)
            elif values is None:
                self._begin_read(_Arriving(write, parcel, source), slots)
            else:
                self._put(slots, values)
                self._copy_in(_Arriving(write, parcel, source), slots)

        self.receiving.ask(write.target_blocks.size, on_slots)

    def drop(self, session: bytes) -> None:
        """Forget the node from which a session reads: it is over, and so are its reads."""
        _, batches = self._readers.pop(session, (None, None))
        if batches is not None:
            batches.stop()

    def _begin_read(self, arriving: _Arriving, slots: Blocks) -> None:
        write = arriving.write
        reads, batches = self._reader(write.session, arriving.source)
        copied = replace(write, target_blocks=slots)
        self._arriving[copied] = arriving
        if reads.error is not None:
            self._on_unread((copied, reads.error))
            return
        self._reads.begin(reads, copied)
        read = partial(self._read, arriving, copied, self._addresses[-1])
        batches.add(read, num_ranges=slots.size, num_bytes=self._end.bytes_in(slots.size))
        batches.tell_after(copied)

    def _reader(
        self, session: bytes, source: MovingEnd
    ) -> tuple[RingSource[Write], Batches[Write]]:
        found = self._readers.get(session)
        if found is None:
            reads: RingSource[Write] = RingSource()
            on_ready = partial(self._on_moved, reads, source.me)
            found = reads, Batches(on_ready, self._end.batch_bytes)
            self._readers[session] = found
        return found

    def _read(self, arriving: _Arriving, copied: Write, address: int, on_done: OnDone) -> None:
        end, source, there = self._end, arriving.source, list(arriving.parcel.blocks)
        end.flights.begin(
            *(end, source, end),
            take=lambda: source.slots_at(there),
            put=partial(self._put_read, copied, address),
            on_done=on_done,
        )

    def _put_read(self, copied: Write, address: int, values: Numbers) -> bool:
        """Put numbers that were read into slots. Raises `InternalError` if others may use them."""
        if address not in self._addresses:
            return False
        if copied not in self._arriving:
            raise InternalError(f"{self._end.me} has slots read into that it has given back")
        return self._put(copied.target_blocks, values)

    def _on_moved(
        self, reads: RingSource[Write], sender: Incarnation, moved: Write | HandoffFailed
    ) -> None:
        if isinstance(moved, Write):
            self._reads.end(reads, moved)
            self._copy_in(self._arriving.pop(moved), moved.target_blocks)
        else:
            self._rests_until_s[sender] = self._end.clock.now_s() + REST_S
            for failed in self._reads.fail(reads, moved):
                self._on_unread(failed)
        self._fence()

    def _fence(self) -> None:
        while (step := self._reads.next_step()) is not None:
            if step is Step.MOVE:
                self._addresses.append(self._num_addresses)
                self._num_addresses += 1
                self._reads.moved(is_beside=True)
            else:
                del self._addresses[:-1]
                for failed in self._reads.fenced():
                    self._on_unread(failed)

    def _on_unread(self, failed: Failed[Write]) -> None:
        copied, error = failed
        write = self._arriving.pop(copied).write
        self._end.end_write(write, self._end.receiver.on_unread(write, error))
        self.receiving.give_back(copied.target_blocks)

    def _copy_in(self, arriving: _Arriving, slots: Blocks) -> None:
        """Verify the contents of slots, and begin their copy to the pool."""
        end, write = self._end, arriving.write
        summed = self.slots_at(slots.tolist())
        damaged = end.damaged_in(write, arriving.parcel, arriving.source, summed)
        targets: Sequence[int] = write.target_blocks.tolist()

        def put(values: Numbers) -> bool:
            if values != summed:
                raise InternalError(f"{end.me} copies other bytes than it has verified")
            end.put(write.data.layer, targets, values)
            return True

        def on_done(_: bool) -> None:
            end.record(write, arriving.parcel, damaged)
            self.receiving.give_back(slots)

        take = partial(end.slots_at, slots.tolist())
        end.flights.begin(*(end, end, end), take=take, put=put, on_done=on_done)
