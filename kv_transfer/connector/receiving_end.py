"""The receiving half of a connector: its machine, the pool it writes, its end of every lane."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import assert_never

from common.errors import HandoffFailed, PeerProtocolError
from kv_transfer.connector.card_ring import CardRing
from kv_transfer.connector.connector_parts import ConnectorParts
from kv_transfer.connector.workers import Finish
from kv_transfer.contract import Ticket
from kv_transfer.lanes import pieces
from kv_transfer.lanes.lane import LateCopyingLane
from kv_transfer.lanes.pieces import PieceRows
from kv_transfer.receiving.effects import CloseLane, Fence, MoveSlab, OpenLane, SendBack, Write
from kv_transfer.receiving.lane_uses import LaneUses
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.block_arrays import Blocks, as_blocks
from kv_transfer.shared.chunks import BlockSums
from kv_transfer.shared.lanes import CARD_LANES, LANES_BY_SPEED
from kv_transfer.transport import Parts
from kv_transfer.wire import frames

_Through = tuple[CardRing, Blocks]
"""Slots of a ring that have the bytes before the card has them."""


class ReceivingEnd:
    """The receiving half of a connector.

    Any thread may call `expect`, `revoke` and the properties; everything else belongs to the
    connector's thread. The machine is called under a lock, and its effects go into the connector's
    queue. Its sizes are read without the lock, so that metrics are there while a thread hangs in
    it. The workers copy without the lock: the machine counts copies, and releases the blocks of a
    landing after the last one.
    """

    def __init__(self, parts: ConnectorParts) -> None:
        self._pool = parts.memory.pool
        self._rows = PieceRows()
        self._block_bytes = [layer.num_bytes for layer in parts.layout.layers]
        self._transport = parts.transport
        self._lanes = parts.lanes
        self._copying = parts.copying
        self._copying_late = parts.copying_late
        self._one_sided = parts.one_sided
        self._metrics = parts.metrics
        self._clock = parts.clock
        self._effects = parts.effects
        self._workers = parts.workers
        self._ring = parts.ring
        slabs = (lane.blocks_per_slab for lane in self._one_sided.values())
        self.machine = Receiver(
            parts.incarnation,
            parts.layout,
            parts.limits,
            num_blocks=parts.num_blocks,
            verify=parts.verify,
            blocks_per_slab=min(slabs, default=None),
        )
        self._lock = threading.Lock()
        self._is_closed = False
        self.bytes_received = 0
        self._checksum_failures = dict.fromkeys(self._lanes, 0)
        self._uses = LaneUses()
        # What goes to slots, on lanes that copy late: the write to the card, and where it is.
        self._through: dict[Write, tuple[Write, _Through]] = {}

    @property
    def num_landings(self) -> int:
        return self.machine.num_landings

    @property
    def num_sessions(self) -> int:
        return self.machine.num_sessions

    @property
    def num_quarantined_blocks(self) -> int:
        return self.machine.num_quarantined_blocks

    @property
    def checksum_failures(self) -> dict[str, int]:
        """Messages with a wrong sum, by lane."""
        return self._checksum_failures.copy()

    # -- the contract ----------------------------------------------------------------------------

    def expect(self, ticket: Ticket, sender_deadline_s: float) -> None:
        """Open a landing; `ValueError` on misuse and after `close`."""
        with self._lock:
            if self._is_closed:
                raise ValueError("the KV connector is closed")
            self.machine.on_expect(ticket, sender_deadline_s, self._clock.now_s())

    def revoke(self, lease_token: int) -> None:
        with self._lock:
            self._effects.extend(self.machine.on_revoke(lease_token))

    # -- events of the network --------------------------------------------------------------------

    def on_message(self, session: bytes, parts: Parts) -> None:
        now_s = self._clock.now_s()
        sizes = [part.nbytes for part in parts[1:]]
        with self._lock:
            try:
                frame = frames.decode_message(parts)
                effects = self.machine.on_frame(session, frame, sizes, now_s)
            except PeerProtocolError as error:
                effects = self.machine.on_malformed(session, error)
        for effect in effects:
            if isinstance(effect, Write):
                # Counted before the acknowledgement after it is sent.
                self._count(effect, now_s)
                self.write(effect, parts[1:])
            else:
                self._effects.append(effect)

    def tick(self) -> None:
        with self._lock:
            self.machine.on_files(is_short=self._transport.is_short_of_files)
            self._effects.extend(self.machine.on_tick(self._clock.now_s()))

    def next_deadline_s(self) -> float | None:
        with self._lock:
            return self.machine.next_deadline_s()

    def refuse(self) -> None:
        """Refuse new landings; open ones may still be written."""
        with self._lock:
            self._is_closed = True

    def close(self) -> None:
        """Close the machine, when no lane and no worker can write the pool any more."""
        with self._lock:
            self._effects.extend(self.machine.on_close())

    # -- effects ---------------------------------------------------------------------------------

    def perform(self, effect: SendBack | OpenLane | CloseLane | MoveSlab | Fence) -> None:
        match effect:
            case SendBack(session, frame):
                self._transport.reply(session, [memoryview(frames.encode(frame))])
            case OpenLane(session, offers):
                self._open_lane(session, offers)
            case CloseLane(session, lane):
                self._close_unused(session, self._uses.leave(session, lane))
            case MoveSlab(lane, slab):
                self._move_slab(lane, slab)
            case Fence(lane, slab):
                self._fence(lane, slab)
            case _:
                assert_never(effect)

    def _count(self, write: Write, now_s: float) -> None:
        num_bytes = len(write.target_blocks) * self._block_bytes[write.data.layer]
        self.bytes_received += num_bytes
        self._metrics.on_piece(write.data.lease_token, write.lane, num_bytes, now_s)

    def write(self, write: Write, parts: Parts) -> None:
        """Copy the pieces into the pool, if the lane copies, and verify them there."""
        self._uses.begin_copy(write.session)
        late = self._copying_late.get(write.lane)
        if self._ring is not None and write.lane not in CARD_LANES:
            self._ask_for_slots(self._ring, late, write, parts)
        elif late is not None:
            self.begin_copy(late, write, parts)
        else:
            self._workers.run(lambda: self.copy(write, parts))

    def _ask_for_slots(
        self, ring: CardRing, late: LateCopyingLane | None, write: Write, parts: Parts
    ) -> None:
        """Copy the pieces to slots when there are enough, and from there to the card."""
        count = write.target_blocks.size
        if count > ring.receiving.count:
            error = f"DATA of {count} blocks: this node takes {ring.receiving.count} at a time"
            self._on_unwritten(write, PeerProtocolError(error))
            return

        def on_slots(slots: Blocks) -> None:
            if late is not None:
                self.begin_copy(late, write, parts, (ring, slots))
            else:
                self._workers.run(lambda: self.copy(write, parts, (ring, slots)))

        ring.receiving.ask(count, on_slots)

    def _may_write(self, write: Write) -> bool:
        with self._lock:
            return self.machine.may_write(write)

    def begin_copy(
        self, lane: LateCopyingLane, write: Write, parts: Parts, through: _Through | None = None
    ) -> None:
        """Start the lane's late copy, into slots of a ring if given, unless it is revoked."""
        if not self._may_write(write):
            self._on_unwritten(write, None, through)
            return
        copied = write
        if through is not None:
            copied = replace(write, target_blocks=through[1])
            self._through[copied] = write, through
        try:
            lane.begin_copy(copied, parts, self._pool)
        except PeerProtocolError as error:
            self._through.pop(copied, None)
            self._on_unwritten(write, error, through)

    def take_copied(self) -> None:
        """Record the copies that are over, on lanes that complete them later."""
        for lane in self._copying_late.values():
            for copied in lane.take_copied():
                write, through = self._through.pop(copied.write, (copied.write, None))
                if copied.error is None:
                    self._recorded(write, copied.sums, through)()
                elif through is None:
                    self._on_failed(write, copied.error)
                else:
                    self._on_unread(write, copied.error, through)

    def copy(self, write: Write, parts: Parts, through: _Through | None = None) -> Finish:
        """Copy and verify, into slots of a ring if they are given; runs on any thread."""
        lane = self._copying.get(write.lane)
        if not self._may_write(write):
            return partial(self._on_unwritten, write, None, through)
        copied = write if through is None else replace(write, target_blocks=through[1])
        try:
            found = lane.copy(copied, parts, self._pool) if lane else self._sums_of_written(write)
        except PeerProtocolError as error:
            return partial(self._on_unwritten, write, error, through)
        return self._recorded(write, found, through)

    def _recorded(self, write: Write, found: pieces.Sums, through: _Through | None) -> Finish:
        """Return what is to be done with a copy; from slots of a ring it goes on to the card."""
        record = self._verified(write, found)
        return record if through is None else partial(self._copy_in, write, *through, record)

    def _verified(self, write: Write, found: pieces.Sums) -> Finish:
        """Return what is to be done with the sums of a copy."""
        if write.verify == "block":
            damaged = pieces.damaged_ordinals(write.data, found)
            if damaged:
                detail = pieces.describe_damage(write.data, found)
                # The other pieces of the frame count.
                return partial(self._on_corrupt, write, damaged, detail)
        num_blocks = len(write.target_blocks)
        sums = pieces.block_sums(found, num_blocks) if write.verify == "commit" else None
        return partial(self._on_written, write, sums)

    def _sums_of_written(self, write: Write) -> pieces.Sums:
        """Return the sums of what the sender wrote by itself."""
        if write.verify == "off":
            return pieces.NO_SUMS
        ordinals = as_blocks(write.data.ordinals)
        return self._rows.sums(self._pool, write.data.layer, write.target_blocks, ordinals)

    # Results of copies.

    def _copy_in(self, write: Write, ring: CardRing, slots: Blocks, record: Finish) -> None:
        """Copy the pieces in slots to the card, and record them when they have arrived."""

        def on_copied(error: HandoffFailed | None) -> None:
            if error is None:
                record()
            else:
                self._on_failed(write, error)
            ring.receiving.give_back(slots)

        ring.copy_in(write.data.layer, slots, write.target_blocks, on_copied)

    def _on_written(self, write: Write, sums: BlockSums | None) -> None:
        with self._lock:
            self._effects.extend(self.machine.on_written(write, sums))
        self._on_copy_ended(write.session)

    def _on_unwritten(
        self,
        write: Write,
        error: PeerProtocolError | None,
        through: _Through | None = None,
    ) -> None:
        with self._lock:
            self._effects.extend(self.machine.on_unwritten(write))
            if error is not None:
                self._effects.extend(self.machine.on_malformed(write.session, error))
        self._on_copy_ended(write.session)
        if through is not None:
            ring, slots = through
            ring.receiving.give_back(slots)

    def _on_unread(self, write: Write, error: HandoffFailed, through: _Through) -> None:
        """Record bytes that the lane failed to copy into slots, finally."""
        with self._lock:
            self._effects.extend(self.machine.on_unread(write, error))
        self._on_copy_ended(write.session)
        ring, slots = through
        ring.receiving.give_back(slots)

    def _on_failed(self, write: Write, error: HandoffFailed) -> None:
        with self._lock:
            self._effects.extend(self.machine.on_copy_failed(write, error))
        self._on_copy_ended(write.session)

    def _on_corrupt(self, write: Write, damaged: frozenset[int], detail: str) -> None:
        self._checksum_failures[write.lane] += 1
        with self._lock:
            self._effects.extend(self.machine.on_corrupt(write, damaged, detail))
        self._on_copy_ended(write.session)

    def _on_copy_ended(self, session: bytes) -> None:
        self._close_unused(session, self._uses.end_copy(session))

    def _close_unused(self, session: bytes, lane: str) -> None:
        """Close the lane, if any, of a session that is over, from which nothing is copied."""
        if lane:
            self._lanes[lane].drop(session)

    def _open_lane(self, session: bytes, offers: Mapping[str, bytes]) -> None:
        chosen, reply = "", b""
        for name in LANES_BY_SPEED:
            lane = self._lanes.get(name)
            answer = lane.open(session, offers[name]) if lane and name in offers else None
            if answer is not None:
                chosen, reply = name, answer
                break
        self._close_unused(session, self._uses.open(session, chosen))
        with self._lock:
            self._effects.extend(self.machine.on_lane(session, chosen, reply, offers))

    def _move_slab(self, name: str, slab: int) -> None:
        lane_reply = self._one_sided[name].move(slab)
        with self._lock:
            self._effects.extend(self.machine.on_moved(name, lane_reply, self._clock.now_s()))

    def _fence(self, name: str, slab: int) -> None:
        self._one_sided[name].fence(slab)
        with self._lock:
            self._effects.extend(self.machine.on_fenced(self._clock.now_s()))
