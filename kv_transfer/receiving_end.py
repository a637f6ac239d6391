"""The receiving half of a connector: its machine, the pool it writes, its end of every lane."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import assert_never

from common.errors import PeerProtocolError
from kv_transfer import pieces
from kv_transfer.connector import Ticket
from kv_transfer.connector_parts import ConnectorParts
from kv_transfer.core import frames
from kv_transfer.core.block_arrays import as_blocks
from kv_transfer.core.effects import CloseLane, Fence, MoveSlab, OpenLane, Reply, Write
from kv_transfer.core.lanes import LANES_BY_SPEED
from kv_transfer.core.receiver import Receiver
from kv_transfer.lane import CopyingLane, LateCopyingLane
from kv_transfer.piece_rows import PieceRows
from kv_transfer.transport import Parts


class ReceivingEnd:
    """The receiving half of a connector.

    Any thread may call `expect`, `revoke` and the properties; everything else belongs to the
    connector's thread. The machine is called under a lock, and its effects go into the connector's
    queue. Its sizes are read without the lock, so that metrics are there while a thread hangs in
    it. The lock is also held from the last check of a landing to the end of its write: that
    makes `revoke` a fence.
    """

    def __init__(self, parts: ConnectorParts) -> None:
        self._pool = parts.pool
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
        slabs = (lane.blocks_per_slab for lane in self._one_sided.values())
        self._machine = Receiver(
            parts.incarnation,
            parts.layout,
            parts.limits,
            num_blocks=parts.pool.num_blocks,
            verify=parts.verify,
            blocks_per_slab=min(slabs, default=None),
            late_lanes=parts.copying_late,
        )
        self._lock = threading.Lock()
        self._is_closed = False
        self.bytes_received = 0
        self._checksum_failures = dict.fromkeys(self._lanes, 0)

    @property
    def num_landings(self) -> int:
        return self._machine.num_landings

    @property
    def num_sessions(self) -> int:
        return self._machine.num_sessions

    @property
    def num_quarantined_blocks(self) -> int:
        return self._machine.num_quarantined_blocks

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
            self._machine.on_expect(ticket, sender_deadline_s, self._clock.now_s())

    def revoke(self, lease_token: int) -> None:
        with self._lock:
            self._effects.extend(self._machine.on_revoke(lease_token))

    # -- events of the network --------------------------------------------------------------------

    def on_message(self, session: bytes, parts: Parts) -> None:
        now_s = self._clock.now_s()
        sizes = [part.nbytes for part in parts[1:]]
        with self._lock:
            try:
                frame = frames.decode_message(parts)
                effects = self._machine.on_frame(session, frame, sizes, now_s)
            except PeerProtocolError as error:
                effects = self._machine.on_malformed(session, error)
        for effect in effects:
            if isinstance(effect, Write):
                # Counted before the acknowledgement behind it is sent.
                self._count(effect, now_s)
                late = self._copying_late.get(effect.lane)
                if late is not None:
                    self._begin_copy(late, effect, parts[1:])
                else:
                    self._write(effect, parts[1:])
            else:
                self._effects.append(effect)

    def take_copied(self) -> None:
        """Verify and acknowledge the copies that are over, on lanes that complete them later."""
        for lane in self._copying_late.values():
            for copied in lane.take_copied():
                write = copied.write
                if copied.error is not None:
                    with self._lock:
                        failed = self._machine.on_copy_failed(write, copied.error)
                    self._effects.extend(failed)
                else:
                    self._record(write, copied.sums)
                self._end_copy(write)

    def tick(self) -> None:
        with self._lock:
            self._machine.on_files(is_short=self._transport.is_short_of_files)
            self._effects.extend(self._machine.on_tick(self._clock.now_s()))

    def next_deadline_s(self) -> float | None:
        with self._lock:
            return self._machine.next_deadline_s()

    def refuse(self) -> None:
        """Accept no more landings; open ones may still be written."""
        with self._lock:
            self._is_closed = True

    def close(self) -> None:
        """Close the machine, when no lane can write the pool any more."""
        with self._lock:
            self._effects.extend(self._machine.on_close())

    # -- effects ---------------------------------------------------------------------------------

    def perform(self, effect: Reply | OpenLane | CloseLane | MoveSlab | Fence) -> None:
        match effect:
            case Reply(session, frame):
                self._transport.reply(session, [memoryview(frames.encode(frame))])
            case OpenLane(session, offers):
                self._open_lane(session, offers)
            case CloseLane(session, lane):
                self._lanes[lane].drop(session)
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

    def _write(self, write: Write, parts: Parts) -> None:
        """Copy the pieces into the pool if the lane copies, and verify what the pool then holds.

        Corrupt pieces never count as arrived.
        """
        lane = self._copying.get(write.lane)
        found = self._copy(lane, write, parts) if lane else self._sums_of_written(write)
        if found is not None:
            self._record(write, found)

    def _begin_copy(self, lane: LateCopyingLane, write: Write, parts: Parts) -> None:
        with self._lock:
            try:
                if self._machine.may_write(write):
                    lane.begin_copy(write, parts, self._pool)
                    return
            except PeerProtocolError as error:
                self._effects.extend(self._machine.on_malformed(write.session, error))
        self._end_copy(write)

    def _end_copy(self, write: Write) -> None:
        with self._lock:
            self._effects.extend(self._machine.on_copied(write, self._clock.now_s()))

    def _record(self, write: Write, found: pieces.Sums) -> None:
        """Record the pieces of a write if they are intact, with the sums that were found."""
        if not self._is_intact(write, found):
            return
        num_blocks = len(write.target_blocks)
        sums = pieces.block_sums(found, num_blocks) if write.verify == "commit" else None
        with self._lock:
            self._effects.extend(self._machine.on_written(write, sums))

    def _copy(self, lane: CopyingLane, write: Write, parts: Parts) -> pieces.Sums | None:
        """Return the sums of the copy; None when the landing was closed, or the frame bad."""
        with self._lock:
            if not self._machine.may_write(write):
                return None
            try:
                return lane.copy(write, parts, self._pool)
            except PeerProtocolError as error:
                self._effects.extend(self._machine.on_malformed(write.session, error))
                return None

    def _sums_of_written(self, write: Write) -> pieces.Sums:
        """Return the sums of what the sender wrote, computed without the lock: it takes long."""
        if write.verify == "off":
            return pieces.NO_SUMS
        ordinals = as_blocks(write.data.ordinals)
        return self._rows.sums(self._pool, write.data.layer, write.target_blocks, ordinals)

    def _is_intact(self, write: Write, sums: pieces.Sums) -> bool:
        """Return whether the sums are those that the sender sent, if it did; report others."""
        if write.verify != "block":
            return True
        damaged = pieces.damaged_ordinals(write.data, sums)
        if not damaged:
            return True
        self._checksum_failures[write.lane] += 1
        detail = pieces.describe_damage(write.data, sums)
        with self._lock:
            self._effects.extend(self._machine.on_corrupt(write, damaged, detail))
        return False

    def _open_lane(self, session: bytes, offers: Mapping[str, bytes]) -> None:
        chosen, reply = "", b""
        for name in LANES_BY_SPEED:
            lane = self._lanes.get(name)
            answer = lane.open(session, offers[name]) if lane and name in offers else None
            if answer is not None:
                chosen, reply = name, answer
                break
        with self._lock:
            self._effects.extend(self._machine.on_lane(session, chosen, reply, offers))

    def _move_slab(self, name: str, slab: int) -> None:
        lane_reply = self._one_sided[name].move(slab)
        with self._lock:
            self._effects.extend(self._machine.on_moved(name, lane_reply, self._clock.now_s()))

    def _fence(self, name: str, slab: int) -> None:
        self._one_sided[name].fence(slab)
        with self._lock:
            self._effects.extend(self._machine.on_fenced(self._clock.now_s()))
