"""The receiving side as a machine without I/O: landings, and the sessions that fill them.

A DATA frame passes, in this order: session, landing, generation, sender, bounds and sizes (here),
once more `may_write` (here, when its copy begins), and only then touches memory. The shell copies
on any thread, verifies checksums of the copied bytes, and reports each `Write` once: `on_written`,
`on_corrupt`, `on_unwritten` or `on_copy_failed`. Then the frame is acknowledged. A piece with a
wrong checksum is not in the pool, and is asked for again a few times before its landing fails. A
frame whose bytes could not be had is not acknowledged, and its connection ends: `on_unread`.

`landings` has the open landings and how they end, `connections` how sessions begin and end.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from common.errors import HandoffFailed, PeerProtocolError
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import GivenUp, Released, Revoked, Ticket
from kv_transfer.receiving.connections import Connections
from kv_transfer.receiving.effects import Dropped, DropReason, SendBack, Write
from kv_transfer.receiving.landing import Landing
from kv_transfer.receiving.landings import Copies, Effects, Landings, failed_frame
from kv_transfer.receiving.quarantine import Quarantine
from kv_transfer.receiving.sessions import Session, Sessions, WindowShares
from kv_transfer.receiving.slab_fences import NO_LEASE, SlabFences
from kv_transfer.shared.chunks import BlockSums
from kv_transfer.shared.deadlines import earliest_s
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.handshake import HandoffStep
from kv_transfer.shared.lanes import ONE_SIDED_LANES, VERIFY_AUTO
from kv_transfer.shared.limits import MAX_WAIT_S, Limits
from kv_transfer.wire import frames


class Receiver:
    """A state machine. `on_…` methods take `now_s` if time matters and return effects, in order.

    Calls of the connector's owner raise `ValueError` on misuse; frames of a peer never raise.
    `sessions` and `landings` are there to be read.
    """

    def __init__(
        self,
        me: Incarnation,
        layout: KVLayout,
        limits: Limits,
        *,
        num_blocks: int,
        verify: str = VERIFY_AUTO,
        blocks_per_slab: int | None = None,
    ) -> None:
        """Make a receiver.

        `verify` is the least that is accepted; `blocks_per_slab`: see `Quarantine`.
        """
        self._me = me
        self._limits = limits
        self._block_bytes = [layer.num_bytes for layer in layout.layers]
        self._ticked_at_s = float("inf")
        self._quarantine = Quarantine(blocks_per_slab or num_blocks)
        self._fences = SlabFences(self._quarantine, limits.report_timeout_s)
        self.sessions = Sessions(me, layout, limits)
        self._windows = WindowShares(limits)
        self._copies = Copies()
        # A peer may begin another session with the same id while a copy is under way.
        self._session_of: dict[Write, Session] = {}
        self.landings = Landings(
            me, layout, self.sessions, self._quarantine, self._copies, num_blocks
        )
        self._connections = Connections(
            me,
            self.sessions,
            self.landings,
            self._windows,
            verify=verify,
            peer_timeout_s=limits.peer_timeout_s,
        )

    @property
    def num_landings(self) -> int:
        return len(self.landings)

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def num_quarantined_blocks(self) -> int:
        return self._quarantine.num_blocks + self._copies.num_held_blocks

    @property
    def quarantined(self) -> dict[int, bytes]:
        """The leases whose blocks a sender may still write, with the session on which it does."""
        return self._quarantine.sessions()

    # -- calls of the owner ----------------------------------------------------------------------

    def on_expect(self, ticket: Ticket, sender_deadline_s: float, now_s: float) -> None:
        """Open a landing; `ValueError` unless the ticket is this node's, with unused blocks."""
        self.landings.expect(ticket, sender_deadline_s, now_s)

    def on_revoke(self, token: int) -> Effects:
        landing = self.landings.get(token)
        if landing is None:
            return []
        error = Revoked(f"{self._me} revoked the lease")
        return self.landings.close(landing, HandoffStep.REVOKE, error)

    def on_close(self) -> Effects:
        """Fail every landing and refuse all connected senders.

        Called when no sender can write the pool any more: every block is released. Of several
        connections of a sender, the refusal on one may overtake the end of a landing on another.
        """
        error = Revoked("the receiving connector was closed")
        effects: Effects = []
        for landing in self.landings.all():
            effects += self.landings.fail(landing, HandoffStep.FAIL, error)
        self._fences.close()
        free = self._quarantine.release_all() + self._copies.release_all()
        effects += [Emit(Released(token)) for token in free]
        refusal = frames.Rejected(frames.LEASE_REVOKED, str(error))
        return effects + [SendBack(session.id, refusal) for session in self.sessions.all()]

    # -- events of the network --------------------------------------------------------------------

    def on_frame(
        self, session_id: bytes, frame: frames.Frame, part_sizes: list[int], now_s: float
    ) -> Effects:
        """Handle a well-formed header, with payload parts of these sizes after it.

        A `PeerProtocolError` ends the session that caused it and is not raised.
        """
        if isinstance(frame, frames.Hello):
            return self._connections.on_hello(session_id, frame, now_s)
        session = self.sessions.get(session_id)
        if session is None:
            refusal = frames.Rejected(frames.NO_SESSION, "say HELLO first")
            detail = f"{type(frame).__name__} from {session_id.hex()}"
            return self._abort_interrupted(session_id, frame) or [
                Dropped(DropReason.NO_SESSION, detail),
                SendBack(session_id, refusal),
            ]
        self.sessions.hear(session, now_s)
        try:
            if part_sizes and not isinstance(frame, frames.Data):
                raise PeerProtocolError(f"{type(frame).__name__} with a payload")
            return self._dispatch(session, frame, part_sizes, now_s)
        except PeerProtocolError as error:
            return self.on_malformed(session_id, error)

    def on_malformed(self, session_id: bytes, error: PeerProtocolError) -> Effects:
        """Drop the session of a message that is no frame of this protocol."""
        return self._connections.on_malformed(session_id, error)

    def on_lane(
        self, session_id: bytes, lane: str, lane_reply: bytes, offered: Iterable[str] = ()
    ) -> Effects:
        """Handle the answer to `OpenLane`; "" when no `offered` lane can be used here."""
        return self._connections.on_lane(session_id, lane, lane_reply, offered)

    def may_write(self, write: Write) -> bool:
        """Return whether the landing that `write` was checked against is still open."""
        return self.landings.of(write) is not None

    def on_written(self, write: Write, sums: BlockSums | None = None) -> Effects:
        """Record that the pieces of `write` are in the pool; ignored if its landing was closed.

        `sums` are those of its blocks if the pair verifies at commit.
        """
        landing = self.landings.of(write)
        try:
            if landing is not None:
                landing.record(write.data, self._copies.spoiled(write), sums)
        except HandoffFailed as error:
            return self.on_copy_failed(write, error)
        return self._copied(write)

    def on_unwritten(self, write: Write) -> Effects:
        """Record that the copy of `write` was not made, or failed."""
        return self._copied(write)

    def on_unread(self, write: Write, error: HandoffFailed) -> Effects:
        """Record that the lane could not get the bytes of `write`, which the pool has nothing of.

        The frame is not acknowledged. Its connection ends, and on the next one it is sent again.
        """
        session = self._session_of.get(write)
        effects: Effects = [Dropped(DropReason.UNREAD, str(error))]
        if session is not None and self.sessions.get(session.id) is session:
            effects += self._connections.interrupt(session.id, error)
        return effects + self._copied(write)

    def on_copy_failed(self, write: Write, error: HandoffFailed) -> Effects:
        """Fail the landing of `write`, whose copy failed."""
        landing = self.landings.of(write)
        failed = self.landings.fail(landing, HandoffStep.FAIL, error) if landing else []
        return failed + self._copied(write)

    def on_corrupt(self, write: Write, damaged: Set[int], detail: str) -> Effects:
        """Ask again for the blocks of a write with a wrong checksum; `damaged` are their ordinals.

        The landing fails when that was asked too often, or its sender does not understand it.
        """
        landing = self.landings.of(write)
        if landing is None:
            return self._copied(write)
        data = write.data
        # One of several connections of the sender may be over.
        session = self.sessions.get(write.session) or self.sessions.get(landing.session or b"")
        landing.record_damaged(data, self._copies.spoiled(write), damaged)
        self._copies.spoil(write, damaged)
        may_ask = landing.damaged.may_ask(data.layer, damaged)
        if not may_ask or (session is not None and not session.can_repeat):
            error = HandoffFailed(f"bad checksum: {detail}")
            return self.landings.fail(landing, HandoffStep.FAIL, error) + self._copied(write)
        landing.damaged.ask(data, damaged)
        effects: Effects = [Dropped(DropReason.DAMAGED, detail)]
        if session is not None:  # Otherwise the COMMIT on the next connection is answered so.
            repeat = landing.repeat(data.layer, tuple(sorted(damaged)))
            effects.append(SendBack(session.id, repeat))
        return effects + self._copied(write)

    def on_files(self, *, is_short: bool) -> None:
        """Refuse further senders as long as this process can open hardly any more files."""
        self.sessions.is_short_of_files = is_short

    def on_tick(self, now_s: float) -> Effects:
        effects: Effects = []
        if now_s - self._ticked_at_s > MAX_WAIT_S + self._limits.ping_interval_s:
            self.sessions.hear_all(now_s)
            self._fences.wait_anew(now_s)
        self._ticked_at_s = now_s
        effects += self._connections.expire(now_s)
        effects += self.landings.expire(now_s)
        return effects + self._next_fence(now_s)

    def on_moved(self, lane: str, lane_reply: bytes, now_s: float) -> Effects:
        """Send the lane's new reply, in which a slab has another address, to its senders."""
        told: dict[bytes, SendBack] = {}
        for session in self.sessions.all():
            if session.lane == lane and session.lane_reply != lane_reply:
                session.lane_reply = lane_reply
                told[session.id] = self._connections.welcome(session)
        return self._fences.on_moved(self.sessions.ids(), told, now_s)

    def on_fenced(self, now_s: float) -> Effects:
        """Release what a fenced slab kept; go on with the next slab."""
        released = [Emit(Released(token)) for token in self._fences.on_fenced()]
        return [*released, *self._next_fence(now_s)]

    def next_deadline_s(self) -> float | None:
        return earliest_s(
            self.landings.next_deadline_s(),
            self.sessions.next_deadline_s(),
            self._fences.next_deadline_s(),
        )

    # -- inside ----------------------------------------------------------------------------------

    def _dispatch(
        self, session: Session, frame: frames.Frame, part_sizes: list[int], now_s: float
    ) -> Effects:
        match frame:
            case frames.Data():
                # A layer that is not there fails its landing below.
                layer = min(frame.layer, len(self._block_bytes) - 1)
                num_bytes = len(frame.ordinals) * self._block_bytes[layer]
                self.sessions.check_window(session, num_bytes)
                session.consume(frame.seq, num_bytes, wants_ack=frame.wants_ack)
                self._windows.sent(session.main, now_s)
                effects = self._on_data(session, frame, part_sizes, now_s)
                writes = [effect for effect in effects if isinstance(effect, Write)]
                for write in writes:
                    self._copies.begin(write)
                    self._session_of[write] = session
                return effects if writes else effects + self._finished(session, frame.seq)
            case frames.Ping() if session.channel:
                return [SendBack(session.id, frames.Pong()), self._last_ack(session)]
            case _ if session.channel:
                raise PeerProtocolError(f"{type(frame).__name__} on channel {session.channel}")
            case frames.Begin():
                return self._on_begin(session, frame, now_s)
            case frames.CommitFrame():
                return self._on_commit(session, frame, now_s)
            case frames.Abort():
                return self._on_abort(session, frame, now_s)
            case frames.Ping(tokens):
                for token in tokens:
                    landing = self.landings.get(token)
                    if landing is not None and landing.session == session.id:
                        landing.renew(now_s)
                pong, ack = SendBack(session.id, frames.Pong()), self._last_ack(session)
                return [pong, ack, *self._fences.on_ping(session.id)]
            case _:
                raise PeerProtocolError(f"{type(frame).__name__} from a sender")

    def _on_data(
        self, session: Session, data: frames.Data, part_sizes: list[int], now_s: float
    ) -> Effects:
        landing = self.landings.get(data.lease_token)
        detail = f"DATA of lease {data.lease_token:#x} from {session.sender}"
        if landing is None:
            is_late = self.landings.outcome(data.lease_token) is not None
            return [Dropped(DropReason.LATE if is_late else DropReason.UNKNOWN_LEASE, detail)]
        if landing.ticket.generation != data.generation:
            return [Dropped(DropReason.STALE_GENERATION, detail)]
        if landing.session != session.main:
            return [Dropped(DropReason.WRONG_SENDER, detail)]
        landing.renew(now_s)
        has_bytes = data.runs or data.source_blocks or data.sums or part_sizes
        if session.channel and not has_bytes:
            # Its transfer was aborted, and the ABORT is still on its way on the first connection.
            return [Dropped(DropReason.LATE, detail)]
        try:
            landing.check(data, part_sizes, session.verify)
        except PeerProtocolError as error:
            return self.landings.fail(landing, HandoffStep.FAIL, error)
        if landing.has_all(data):
            return [Dropped(DropReason.DUPLICATE, detail)]
        changed = landing.damaged.changed(data)
        if changed is not None:
            what = f"block {changed} of the ticket in layer {data.layer}"
            other = HandoffFailed(f"bad checksum: {what} was sent again with another sum")
            return self.landings.fail(landing, HandoffStep.FAIL, other)
        targets = landing.targets_of(data)
        return [Write(session.id, session.lane, session.verify, data, targets)]

    def _on_begin(self, session: Session, frame: frames.Begin, now_s: float) -> Effects:
        landing = self.landings.find(session, frame)
        if not isinstance(landing, Landing):
            return [SendBack(session.id, landing)]
        is_copied = self._copies.is_under_way((frame.lease_token, frame.generation))
        will_be_written = session.lane in ONE_SIDED_LANES
        if landing.session != session.id and (
            landing.may_be_written or (will_be_written and is_copied)
        ):
            # Writes or copies of the other connection may still arrive.
            error = HandoffFailed(f"the connection of {session.sender} broke while it wrote")
            failed = self.landings.fail(landing, HandoffStep.FAIL, error)
            return [*failed, SendBack(session.id, failed_frame(landing, error))]
        landing.advance(HandoffStep.BEGIN)
        if landing.sender is None:
            landing.sender = session.sender
            self.sessions.began(session)
        landing.session = session.id
        landing.lane = session.lane
        landing.renew(now_s)
        if not landing.may_be_written and session.num_channels == 1:
            return []
        # Its sender waits for this: blocks that nobody began to write are released at once, and
        # DATA on another connection would arrive before BEGIN.
        return [SendBack(session.id, frames.Begun(landing.token, landing.ticket.generation))]

    def _on_commit(self, session: Session, frame: frames.CommitFrame, now_s: float) -> Effects:
        landing = self.landings.find(session, frame)
        if not isinstance(landing, Landing):
            return [SendBack(session.id, landing)]
        if landing.session != session.id or not landing.advance(HandoffStep.COMMIT):
            raise PeerProtocolError("COMMIT before BEGIN")
        landing.renew(now_s)
        try:
            landing.promise(frame, session.verify)
        except HandoffFailed as error:
            return self.landings.fail(landing, HandoffStep.FAIL, error)
        # Everything sent was consumed, so a REPEAT whose piece has not come was lost.
        missing = landing.damaged.missing()
        again: Effects = [
            SendBack(session.id, landing.repeat(layer, ordinals)) for layer, ordinals in missing
        ]
        return again or self.landings.complete(landing)

    def _abort_interrupted(self, session_id: bytes, frame: frames.Frame) -> Effects:
        """End a landing whose connection was interrupted, by an ABORT that was on its way on it.

        Its sender may be about to end, and will not connect again to say so.
        """
        landing = self.landings.get(frame.lease_token) if isinstance(frame, frames.Abort) else None
        if landing is None or landing.session != session_id or landing.may_be_written:
            return []
        error = GivenUp(f"{landing.sender} aborted the transfer")
        return self.landings.fail(landing, HandoffStep.FAIL, error)

    def _on_abort(self, session: Session, frame: frames.Abort, now_s: float) -> Effects:
        if frame.lease_token == NO_LEASE:
            self._fences.on_report(session.id, frame.generation)
            return self._next_fence(now_s)
        outcome = self.landings.outcome(frame.lease_token)
        if isinstance(outcome, frames.Committed) and outcome.generation == frame.generation:
            return [SendBack(session.id, outcome)]
        effects: Effects = [
            SendBack(session.id, frames.Aborted(frame.lease_token, frame.generation))
        ]
        landing = self.landings.get(frame.lease_token)
        if (
            landing is not None
            and landing.ticket.generation == frame.generation
            and landing.sender in (None, session.sender)
        ):
            # ABORTED is the answer, so no FAILED is sent.
            if landing.session == session.id:
                landing.session = None
            error = GivenUp(f"{session.sender} aborted the transfer")
            effects += self.landings.fail(landing, HandoffStep.FAIL, error)
        if self._quarantine.release(frame.lease_token, frame.generation, session.id):
            effects.append(Emit(Released(frame.lease_token)))
        return effects

    def _copied(self, write: Write) -> Effects:
        """Acknowledge a frame whose copy has ended; land or release what waited for that."""
        is_released = self._copies.end(write)
        effects: Effects = [Emit(Released(write.data.lease_token))] if is_released else []
        session = self._session_of.pop(write, None)
        if session is not None and self.sessions.get(session.id) is session:
            effects += self._finished(session, write.data.seq)
        landing = self.landings.of(write)
        return effects if landing is None else effects + self.landings.complete(landing)

    def _finished(self, session: Session, seq: int) -> Effects:
        session.finish(seq)
        ack = session.take_ack() if session.is_ack_due else None
        return [] if ack is None else [SendBack(session.id, self._with_window(session, ack))]

    def _last_ack(self, session: Session) -> SendBack:
        """Return the last credit again, in case its frame did not fit into a full queue."""
        return SendBack(session.id, self._with_window(session, session.last_ack()))

    def _with_window(self, session: Session, ack: frames.Ack) -> frames.Ack:
        session.window_bytes = self._windows.share_bytes(session.main, session.heard_at_s)
        return replace(ack, window_bytes=session.window_bytes)

    def _next_fence(self, now_s: float) -> Effects:
        return self._fences.next_step(self.sessions.ids(), now_s)
