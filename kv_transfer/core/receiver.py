"""The receiving side as a machine without I/O: landings, and the sessions that fill them.

A DATA frame passes, in this order: session, landing, generation, sender, bounds and sizes (here),
once more `may_write` (here, under the lock that `revoke` takes), and only then touches memory. The
shell verifies checksums of the copied bytes: a piece with a wrong checksum is not in the pool, and
is asked for again a few times before its landing fails.

A landing's hold on its blocks ends when it lands or with `Released`; see `quarantine` for lanes on
which the sender writes by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set

from common.errors import HandoffFailed, PdserveError, PeerProtocolError
from common.ids import Incarnation
from common.kv_layout import KVLayout
from kv_transfer.connector import Landed, LandingFailed, Released, Ticket
from kv_transfer.core import frames
from kv_transfer.core.chunks import BlockSums
from kv_transfer.core.deadlines import Deadlines
from kv_transfer.core.effects import (
    CloseLane,
    Dropped,
    DropReason,
    Emit,
    OpenLane,
    ReceiverEffect,
    Reply,
    Write,
)
from kv_transfer.core.handshake import HandoffStep
from kv_transfer.core.header_seal import DamagedHeader
from kv_transfer.core.landing import Landing
from kv_transfer.core.lanes import LANE_NEEDS, VERIFY_AUTO, verification
from kv_transfer.core.limits import (
    MAX_BLOCKS_PER_FRAME,
    MAX_REMEMBERED_OUTCOMES,
    MAX_WAIT_S,
    Limits,
)
from kv_transfer.core.quarantine import Quarantine
from kv_transfer.core.sessions import Session, Sessions
from kv_transfer.core.slab_fences import NO_LEASE, SlabFences
from kv_transfer.core.window_shares import WindowShares

Effects = list[ReceiverEffect]
_Outcome = frames.Committed | frames.Failed


class Receiver:
    """A state machine. `on_…` methods take `now_s` if time matters and return effects, in order.

    Calls of the connector's owner raise `ValueError` on misuse; frames of a peer never raise.
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
        self._layout = layout
        self._limits = limits
        self._block_bytes = [layer.num_bytes for layer in layout.layers]
        self._num_blocks = num_blocks
        self._sessions = Sessions(me, layout, limits)
        self._windows = WindowShares(limits)
        self._landings: dict[int, Landing] = {}
        self._landing_of_block: dict[int, int] = {}
        # Times at which a landing expires unless its sender was heard since.
        self._leases: Deadlines[int] = Deadlines()
        self._verify = verify
        self._ticked_at_s = float("inf")
        self._quarantine = Quarantine(blocks_per_slab or num_blocks)
        self._fences = SlabFences(self._quarantine, limits.peer_timeout_s)
        # Kept so that a commit repeated after a lost answer gets the same answer again.
        self._outcomes: OrderedDict[int, _Outcome] = OrderedDict()

    @property
    def num_landings(self) -> int:
        return len(self._landings)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_quarantined_blocks(self) -> int:
        return self._quarantine.num_blocks

    # -- calls of the owner ----------------------------------------------------------------------

    def on_expect(self, ticket: Ticket, sender_deadline_s: float, now_s: float) -> None:
        """Open a landing; `ValueError` unless the ticket is this node's, with unused blocks."""
        token, blocks = ticket.lease_token, ticket.target_block_ids
        if token in self._landings or token in self._outcomes:
            raise ValueError(f"lease {token:#x} is or was open already")
        if ticket.decode_node != self._me or ticket.fingerprint != self._layout.fingerprint:
            raise ValueError(f"lease {token:#x} is for another node or KV layout")
        if not blocks or len(set(blocks)) != len(blocks):
            raise ValueError(f"lease {token:#x} has no target block, or one twice")
        for block in blocks:
            if not 0 <= block < self._num_blocks or block in self._landing_of_block:
                raise ValueError(f"target block {block} is outside the pool or lands already")
            if self._quarantine.holds(block):
                raise ValueError(f"target block {block} was not released yet")
        self._landing_of_block.update(dict.fromkeys(blocks, token))
        landing = Landing(ticket, self._layout, sender_deadline_s=sender_deadline_s, now_s=now_s)
        self._landings[token] = landing
        self._leases.set_no_later(token, landing.expires_at_s)

    def on_revoke(self, token: int) -> Effects:
        landing = self._landings.get(token)
        if landing is None:
            return []
        error = HandoffFailed(f"{self._me} revoked the lease")
        return self._close(landing, HandoffStep.REVOKE, _failed(landing, error))

    def on_close(self) -> Effects:
        """Fail every landing and refuse all connected senders.

        Called when no sender can write the pool any more: every block is released.
        """
        error = HandoffFailed("the receiving connector was closed")
        effects: Effects = []
        for landing in list(self._landings.values()):
            effects += self._fail(landing, HandoffStep.FAIL, error)
        self._fences.close()
        effects += [Emit(Released(token)) for token in self._quarantine.release_all()]
        refusal = frames.Refused(error.code, str(error))
        return effects + [Reply(session.id, refusal) for session in self._sessions.all()]

    # -- events of the network --------------------------------------------------------------------

    def on_frame(
        self, session_id: bytes, frame: frames.Frame, part_sizes: list[int], now_s: float
    ) -> Effects:
        """Handle a well-formed header, with payload parts of these sizes behind it.

        A `PeerProtocolError` ends the session that caused it and is not raised.
        """
        if isinstance(frame, frames.Hello):
            return self._on_hello(session_id, frame, now_s)
        session = self._sessions.get(session_id)
        if session is None:
            refusal = frames.Refused(frames.NO_SESSION, "say HELLO first")
            detail = f"{type(frame).__name__} from {session_id.hex()}"
            return [Dropped(DropReason.NO_SESSION, detail), Reply(session_id, refusal)]
        session.heard_at_s = now_s
        try:
            if part_sizes and not isinstance(frame, frames.Data):
                raise PeerProtocolError(f"{type(frame).__name__} with a payload")
            return self._dispatch(session, frame, part_sizes, now_s)
        except PeerProtocolError as error:
            return self.on_malformed(session_id, error)

    def on_malformed(self, session_id: bytes, error: PeerProtocolError) -> Effects:
        """Drop the session of a message that is no frame of this protocol."""
        effects: Effects = [Dropped(DropReason.MALFORMED, str(error))]
        is_known = self._sessions.get(session_id) is not None
        if is_known and isinstance(error, DamagedHeader):
            return effects + self._interrupt(session_id, error)
        if is_known or isinstance(error, frames.UnknownVersion):
            effects.append(Reply(session_id, frames.Refused(error.code, str(error))))
        return effects + self._drop_session(session_id, HandoffStep.FAIL, error)

    def on_lane(
        self, session_id: bytes, lane: str, lane_reply: bytes, offered: Iterable[str] = ()
    ) -> Effects:
        """Handle the answer to `OpenLane`; "" when no `offered` lane can be used here."""
        session = self._sessions.get(session_id)
        if session is None:
            return []
        if not lane:
            self._sessions.drop(session_id)
            needs = "".join(f"; {LANE_NEEDS[name]}" for name in offered if name in LANE_NEEDS)
            error = HandoffFailed(f"{self._me} supports none of the offered lanes{needs}")
            return [Reply(session_id, frames.Refused(error.code, str(error)))]
        session.lane, session.lane_reply = lane, lane_reply
        session.verify = verification(lane, self._verify, session.wanted_verify)
        return [self._welcome(session)]

    def may_write(self, write: Write) -> bool:
        """Return whether the landing that `write` was checked against is still open."""
        landing = self._landings.get(write.data.lease_token)
        return landing is not None and landing.ticket.generation == write.data.generation

    def on_written(self, write: Write, sums: BlockSums | None = None) -> Effects:
        """Record that the pieces of `write` are in the pool; ignored if its landing was closed.

        `sums` are those of its blocks if the pair verifies at commit.
        """
        if not self.may_write(write):
            return []
        landing = self._landings[write.data.lease_token]
        landing.record(write.data, sums)
        return self._complete(landing)

    def on_corrupt(self, write: Write, damaged: Set[int], detail: str) -> Effects:
        """Ask again for the blocks of a write with a wrong checksum; `damaged` are their ordinals.

        The landing fails when that was asked too often, or its sender does not understand it.
        """
        landing = self._landings.get(write.data.lease_token)
        if landing is None or not self.may_write(write):
            return []
        data, session = write.data, self._sessions.get(write.session)
        landing.record_damaged(data, damaged)
        can_repeat = session is not None and session.can_repeat
        if not can_repeat or not landing.damaged.may_ask(data.layer, damaged):
            return self._fail(landing, HandoffStep.FAIL, HandoffFailed(f"bad checksum: {detail}"))
        landing.damaged.ask(data, damaged)
        repeat = _repeat(landing, data.layer, tuple(sorted(damaged)))
        return [Dropped(DropReason.DAMAGED, detail), Reply(write.session, repeat)]

    def on_files(self, *, is_short: bool) -> None:
        """Refuse further senders as long as this process can open hardly any more files."""
        self._sessions.is_short_of_files = is_short

    def on_tick(self, now_s: float) -> Effects:
        effects: Effects = []
        if now_s - self._ticked_at_s > MAX_WAIT_S + self._limits.ping_interval_s:
            self._sessions.hear_all(now_s)
            self._fences.wait_anew(now_s)
        self._ticked_at_s = now_s
        for session in self._sessions.take_silent(now_s):
            error = HandoffFailed(
                f"{session.sender} was silent for {self._limits.peer_timeout_s:g} s"
            )
            effects += self._drop_session(session.id, HandoffStep.EXPIRE, error)
        for landing in [self._landings[token] for token in self._leases.take_due(now_s)]:
            if now_s >= landing.expires_at_s:
                error = HandoffFailed(f"the sender was silent for {landing.sender_deadline_s:g} s")
                effects += self._fail(landing, HandoffStep.EXPIRE, error)
            else:
                self._leases.set_no_later(landing.token, landing.expires_at_s)
        return effects + self._next_fence(now_s)

    def on_moved(self, lane: str, lane_reply: bytes, now_s: float) -> Effects:
        """Send the lane's new reply, in which a slab has another address, to its senders."""
        told: dict[bytes, Reply] = {}
        for session in self._sessions.all():
            if session.lane == lane and session.lane_reply != lane_reply:
                session.lane_reply = lane_reply
                told[session.id] = self._welcome(session)
        return self._fences.on_moved(self._sessions.ids(), told, now_s)

    def on_fenced(self, now_s: float) -> Effects:
        """Release what a fenced slab kept; go on with the next slab."""
        released = [Emit(Released(token)) for token in self._fences.on_fenced()]
        return [*released, *self._next_fence(now_s)]

    def next_deadline_s(self) -> float | None:
        landings, sessions = self._leases.next_s(), self._sessions.next_deadline_s()
        times = (landings, sessions, self._fences.next_deadline_s())
        return min((at_s for at_s in times if at_s is not None), default=None)

    # -- inside ----------------------------------------------------------------------------------

    def _on_hello(self, session_id: bytes, hello: frames.Hello, now_s: float) -> Effects:
        try:
            earlier = self._sessions.admit(session_id, hello, now_s)
        except PeerProtocolError as error:
            return self.on_malformed(session_id, error)
        except PdserveError as error:
            refusal = frames.Refused(error.code, str(error))
            detail = f"{hello.sender}: {error}"
            return [Dropped(DropReason.REFUSED, detail), Reply(session_id, refusal)]
        session = self._sessions.get(session_id)
        assert session is not None, "it was just admitted"
        effects = [] if earlier is None else self._replace(earlier, session)
        session.window_bytes = self._windows.share_bytes(session_id, now_s)
        session.welcome_bytes = session.welcome_bytes or session.window_bytes
        welcome = self._welcome(session) if session.lane else OpenLane(session_id, hello.offers)
        return [*effects, welcome]

    def _welcome(self, session: Session) -> Reply:
        welcome = frames.Welcome(
            receiver=self._me,
            lane=session.lane,
            lane_reply=session.lane_reply,
            window_bytes=session.window_bytes,
            verify=session.verify,
            quiet_s=self._sessions.quiet_s(session),
            frame_blocks=MAX_BLOCKS_PER_FRAME,
        )
        return Reply(session.id, welcome)

    def _dispatch(
        self, session: Session, frame: frames.Frame, part_sizes: list[int], now_s: float
    ) -> Effects:
        match frame:
            case frames.Data():
                # A layer that is not there fails its landing below.
                layer = min(frame.layer, len(self._block_bytes) - 1)
                session.consume(frame.seq, len(frame.ordinals) * self._block_bytes[layer])
                self._windows.sent(session.id, now_s)
                effects = self._on_data(session, frame, part_sizes, now_s)
                is_due = session.owes_credit or frame.wants_ack
                return effects + (self._ack(session, now_s) if is_due else [])
            case frames.Begin():
                return self._on_begin(session, frame, now_s)
            case frames.CommitFrame():
                return self._on_commit(session, frame, now_s)
            case frames.Abort():
                return self._on_abort(session, frame, now_s)
            case frames.Ping(tokens):
                for token in tokens:
                    landing = self._landings.get(token)
                    if landing is not None and landing.session == session.id:
                        landing.renew(now_s)
                # The last credit again, in case its frame did not fit into a full queue.
                session.window_bytes = self._windows.share_bytes(session.id, now_s)
                pong, ack = Reply(session.id, frames.Pong()), Reply(session.id, session.last_ack())
                return [pong, ack, *self._fences.on_ping(session.id)]
            case _:
                raise PeerProtocolError(f"{type(frame).__name__} from a sender")

    def _on_data(
        self, session: Session, data: frames.Data, part_sizes: list[int], now_s: float
    ) -> Effects:
        landing = self._landings.get(data.lease_token)
        detail = f"DATA of lease {data.lease_token:#x} from {session.sender}"
        if landing is None:
            is_late = data.lease_token in self._outcomes
            return [Dropped(DropReason.LATE if is_late else DropReason.UNKNOWN_LEASE, detail)]
        if landing.ticket.generation != data.generation:
            return [Dropped(DropReason.STALE_GENERATION, detail)]
        if landing.session != session.id:
            return [Dropped(DropReason.WRONG_SENDER, detail)]
        landing.renew(now_s)
        try:
            landing.check_bounds(data, part_sizes)
        except PeerProtocolError as error:
            return self._fail(landing, HandoffStep.FAIL, error)
        if landing.has_all(data):
            return [Dropped(DropReason.DUPLICATE, detail)]
        if (session.verify == "block") != bool(data.sums):
            broken = PeerProtocolError(f"DATA breaks the agreement to verify: {session.verify}")
            return self._fail(landing, HandoffStep.FAIL, broken)
        changed = landing.damaged.changed(data)
        if changed is not None:
            what = f"block {changed} of the ticket in layer {data.layer}"
            other = HandoffFailed(f"bad checksum: {what} was sent again with another sum")
            return self._fail(landing, HandoffStep.FAIL, other)
        targets = landing.targets_of(data)
        return [Write(session.id, session.lane, session.verify, data, targets)]

    def _find(
        self, session: Session, frame: frames.Begin | frames.CommitFrame
    ) -> Landing | _Outcome:
        """Return the open landing that `frame` belongs to, or the reply that there is none."""
        landing = self._landings.get(frame.lease_token)
        outcome = self._outcomes.get(frame.lease_token)
        if landing is None and outcome is not None and outcome.generation == frame.generation:
            return outcome
        if landing is None:
            problem = f"{self._me} has no such lease"
        elif landing.ticket.generation != frame.generation:
            problem = (
                f"the lease is at generation {landing.ticket.generation}, "
                f"the sender names {frame.generation}"
            )
        elif landing.sender not in (None, session.sender):
            problem = f"{landing.sender} writes here, not {session.sender}"
        else:
            return landing
        return frames.Failed(frame.lease_token, frame.generation, HandoffFailed.code, problem)

    def _on_begin(self, session: Session, frame: frames.Begin, now_s: float) -> Effects:
        landing = self._find(session, frame)
        if not isinstance(landing, Landing):
            return [Reply(session.id, landing)]
        if landing.may_be_written and landing.session != session.id:
            # Writes of the other connection may still arrive.
            error = HandoffFailed(f"the connection of {session.sender} broke while it wrote")
            failed = self._fail(landing, HandoffStep.FAIL, error)
            return [*failed, Reply(session.id, _failed(landing, error))]
        landing.advance(HandoffStep.BEGIN)
        if landing.sender is None:
            landing.sender = session.sender
            self._sessions.began(session)
        landing.session = session.id
        landing.lane = session.lane
        landing.renew(now_s)
        if not landing.may_be_written:
            return []
        # Its sender waits for this: blocks that nobody began to write are released at once.
        return [Reply(session.id, frames.Begun(landing.token, landing.ticket.generation))]

    def _on_commit(self, session: Session, frame: frames.CommitFrame, now_s: float) -> Effects:
        landing = self._find(session, frame)
        if not isinstance(landing, Landing):
            return [Reply(session.id, landing)]
        if landing.session != session.id or not landing.advance(HandoffStep.COMMIT):
            raise PeerProtocolError("COMMIT before BEGIN")
        landing.renew(now_s)
        try:
            landing.promise(frame, session.verify)
        except HandoffFailed as error:
            return self._fail(landing, HandoffStep.FAIL, error)
        # Everything sent was consumed, so a REPEAT whose piece has not come was lost.
        missing = landing.damaged.missing()
        again: Effects = [
            Reply(session.id, _repeat(landing, layer, ordinals)) for layer, ordinals in missing
        ]
        return again or self._complete(landing)

    def _on_abort(self, session: Session, frame: frames.Abort, now_s: float) -> Effects:
        if frame.lease_token == NO_LEASE:
            self._fences.on_report(session.id, frame.generation)
            return self._next_fence(now_s)
        outcome = self._outcomes.get(frame.lease_token)
        if isinstance(outcome, frames.Committed) and outcome.generation == frame.generation:
            return [Reply(session.id, outcome)]
        effects: Effects = [Reply(session.id, frames.Aborted(frame.lease_token, frame.generation))]
        landing = self._landings.get(frame.lease_token)
        if (
            landing is not None
            and landing.ticket.generation == frame.generation
            and landing.sender in (None, session.sender)
        ):
            # ABORTED is the answer, so no FAILED is sent.
            if landing.session == session.id:
                landing.session = None
            error = HandoffFailed(f"{session.sender} aborted the transfer")
            effects += self._fail(landing, HandoffStep.FAIL, error)
        if self._quarantine.release(frame.lease_token, frame.generation, session.id):
            effects.append(Emit(Released(frame.lease_token)))
        return effects

    def _complete(self, landing: Landing) -> Effects:
        """Land the landing if nothing is missing."""
        commit = landing.complete()
        if commit is None:
            return []
        outcome = frames.Committed(landing.token, landing.ticket.generation)
        return [*self._forget(landing, outcome), Emit(Landed(landing.token, commit))]

    def _fail(self, landing: Landing, step: HandoffStep, error: HandoffFailed) -> Effects:
        failed = Emit(LandingFailed(landing.token, error))
        return [failed, *self._close(landing, step, _failed(landing, error))]

    def _close(self, landing: Landing, step: HandoffStep, outcome: frames.Failed) -> Effects:
        """End a landing without KV; release or quarantine its blocks."""
        session = landing.session
        if landing.may_be_written and session is not None:
            self._quarantine.add(landing, session, landing.lane)
            return self._forget(landing, outcome)
        landing.advance(step)
        return [*self._forget(landing, outcome), Emit(Released(landing.token))]

    def _forget(self, landing: Landing, outcome: _Outcome) -> Effects:
        """Close the landing, keep its outcome, notify its sender."""
        del self._landings[landing.token]
        self._leases.discard(landing.token)
        if landing.sender is not None:
            self._sessions.ended(landing.sender)
        for block in landing.ticket.target_block_ids:
            del self._landing_of_block[block]
        self._outcomes[landing.token] = outcome
        if len(self._outcomes) > MAX_REMEMBERED_OUTCOMES:
            self._outcomes.popitem(last=False)
        return [] if landing.session is None else [Reply(landing.session, outcome)]

    def _ack(self, session: Session, now_s: float) -> Effects:
        session.window_bytes = self._windows.share_bytes(session.id, now_s)
        ack = session.take_ack()
        return [] if ack is None else [Reply(session.id, ack)]

    def _next_fence(self, now_s: float) -> Effects:
        return self._fences.next_step(self._sessions.ids(), now_s)

    def _interrupt(self, session_id: bytes, error: DamagedHeader) -> Effects:
        """End a connection that damaged a header; its landings continue on the next one."""
        session = self._sessions.get(session_id)
        assert session is not None
        self._sessions.drop(session_id)
        effects: Effects = [Reply(session_id, frames.Refused(frames.NO_SESSION, str(error)))]
        for landing in list(self._landings.values()):
            if landing.session == session_id and not landing.damaged.may_lose_header():
                effects += self._fail(landing, HandoffStep.FAIL, error)
        return effects + self._closed(session)

    def _replace(self, earlier: Session, session: Session) -> Effects:
        """End a session whose sender has begun another one.

        Its landings continue when the same life begins them there, and fail after another life's.
        """
        effects: Effects = []
        if earlier.sender != session.sender:
            error = HandoffFailed(f"{earlier.sender} restarted")
            effects = self._fail_all(earlier.sender, HandoffStep.FAIL, error)
        return effects + self._closed(earlier)

    def _drop_session(self, session_id: bytes, step: HandoffStep, error: HandoffFailed) -> Effects:
        session = self._sessions.get(session_id)
        if session is None:
            return []
        self._sessions.drop(session_id)
        return self._fail_all(session.sender, step, error) + self._closed(session)

    def _closed(self, session: Session) -> Effects:
        self._windows.drop(session.id)
        return [CloseLane(session.id, session.lane)] if session.lane else []

    def _fail_all(self, sender: Incarnation, step: HandoffStep, error: HandoffFailed) -> Effects:
        """Fail the landings of a sender, which has no session; some began on earlier ones."""
        landings = [one for one in self._landings.values() if one.sender == sender]
        return [effect for one in landings for effect in self._fail(one, step, error)]


def _repeat(landing: Landing, layer: int, ordinals: tuple[int, ...]) -> frames.Repeat:
    return frames.Repeat(landing.token, landing.ticket.generation, layer, ordinals)


def _failed(landing: Landing, error: HandoffFailed) -> frames.Failed:
    return frames.Failed(landing.token, landing.ticket.generation, error.code, str(error))
