"""How connections of senders begin and end, with what becomes of their landings."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import HandoffFailed, PdserveError, PeerProtocolError
from common.ids import Incarnation
from kv_transfer.receiving.effects import CloseLane, Dropped, DropReason, OpenLane, SendBack
from kv_transfer.receiving.landings import Effects, Landings
from kv_transfer.receiving.sessions import Session, Sessions, WindowShares
from kv_transfer.shared.handshake import HandoffStep
from kv_transfer.shared.lanes import INLINE_LANES, LANE_NEEDS, verification
from kv_transfer.shared.limits import MAX_BLOCKS_PER_FRAME
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import DamagedHeader


class Connections:
    """A state machine over `sessions`; `verify` is the least that is accepted."""

    def __init__(
        self,
        me: Incarnation,
        sessions: Sessions,
        landings: Landings,
        windows: WindowShares,
        *,
        verify: str,
        peer_timeout_s: float,
    ) -> None:
        self._me = me
        self._peer_timeout_s = peer_timeout_s
        self._sessions = sessions
        self._landings = landings
        self._windows = windows
        self._verify = verify

    def on_hello(self, session_id: bytes, hello: frames.Hello, now_s: float) -> Effects:
        """Begin a session, or a further connection of one."""
        if hello.channel:
            return self._on_further(session_id, hello, now_s)
        try:
            earlier = self._sessions.admit(session_id, hello, now_s)
        except PeerProtocolError as error:
            return self.on_malformed(session_id, error)
        except PdserveError as error:
            refusal = frames.Rejected(error.code, str(error))
            detail = f"{hello.sender}: {error}"
            return [Dropped(DropReason.REFUSED, detail), SendBack(session_id, refusal)]
        session = self._sessions.get(session_id)
        assert session is not None, "it was just admitted"
        effects = self._end_earlier_lives(session.sender)
        effects += [] if earlier is None else self._closed(earlier)
        session.window_bytes = self._windows.share_bytes(session_id, now_s)
        session.welcome_bytes = session.welcome_bytes or session.window_bytes
        welcome = self.welcome(session) if session.lane else OpenLane(session_id, hello.offers)
        return [*effects, welcome]

    def on_lane(
        self, session_id: bytes, lane: str, lane_reply: bytes, offered: Iterable[str] = ()
    ) -> Effects:
        """Handle the answer to `OpenLane`; "" when no `offered` lane can be used here."""
        session = self._sessions.get(session_id)
        if session is None:
            return []
        if not lane:
            needs = "".join(f"; {LANE_NEEDS[name]}" for name in offered if name in LANE_NEEDS)
            error = HandoffFailed(f"{self._me} supports none of the offered lanes{needs}")
            refusal = SendBack(session_id, frames.Rejected(error.code, str(error)))
            # An earlier connection had one, and its landings cannot continue.
            return [refusal, *self.drop(session_id, HandoffStep.FAIL, error)]
        session.lane, session.lane_reply = lane, lane_reply
        session.verify = verification(lane, self._verify, session.wanted_verify)
        if lane not in INLINE_LANES:
            session.num_channels = 1  # The bytes go another way.
        self._sessions.watch(session)  # How long it may be silent depends on the lane.
        return [self.welcome(session)]

    def welcome(self, session: Session) -> SendBack:
        """Return the WELCOME of a session, as its lane is now."""
        welcome = frames.Welcome(
            receiver=self._me,
            lane=session.lane,
            lane_reply=session.lane_reply,
            window_bytes=session.window_bytes,
            verify=session.verify,
            quiet_s=self._sessions.quiet_s(session),
            frame_blocks=MAX_BLOCKS_PER_FRAME,
            num_channels=session.num_channels,
            group=session.main if session.num_channels > 1 else b"",
        )
        return SendBack(session.id, welcome)

    def on_malformed(self, session_id: bytes, error: PeerProtocolError) -> Effects:
        """Drop the session of a message that is no frame of this protocol."""
        effects: Effects = [Dropped(DropReason.MALFORMED, str(error))]
        is_known = self._sessions.get(session_id) is not None
        if is_known and isinstance(error, DamagedHeader):
            return effects + self.interrupt(session_id, error)
        if is_known or isinstance(error, frames.UnknownVersion):
            effects.append(SendBack(session_id, frames.Rejected(error.code, str(error))))
        return effects + self.drop(session_id, HandoffStep.FAIL, error)

    def drop(self, session_id: bytes, step: HandoffStep, error: HandoffFailed) -> Effects:
        """End a session and fail the landings of its sender."""
        session = self._sessions.get(session_id)
        if session is None:
            return []
        main = self._sessions.get(session.main)
        assert main is not None, "it ends with its further connections"
        session = main
        self._sessions.drop(session.id)
        return self._landings.fail_all(session.sender, step, error) + self._closed(session)

    def interrupt(self, session_id: bytes, error: HandoffFailed) -> Effects:
        """End a connection that lost a header, or a frame's bytes; its landings continue.

        Its sender connects again and sends what was not acknowledged.
        """
        session = self._sessions.get(session_id)
        assert session is not None
        self._sessions.await_again(session)
        effects: Effects = [SendBack(session_id, frames.Rejected(frames.NO_SESSION, str(error)))]
        for landing in self._landings.all():
            if landing.session == session.main and not landing.damaged.may_lose_header():
                effects += self._landings.fail(landing, HandoffStep.FAIL, error)
        return effects + self._closed(session)

    def expire(self, now_s: float) -> Effects:
        """End what belongs to senders that were silent for too long, or that did not come back."""
        effects: Effects = []
        for session in self._sessions.take_silent(now_s):
            span_s = self._sessions.patience_s(session)
            error = HandoffFailed(f"{session.sender} was silent for {span_s:g} s")
            effects += self.drop(session.id, HandoffStep.EXPIRE, error)
        span = f"{self._peer_timeout_s:g} s"
        for sender in self._sessions.take_missing(now_s):
            error = HandoffFailed(f"{sender} did not connect again within {span}")
            effects += self._landings.fail_all(sender, HandoffStep.EXPIRE, error)
        return effects

    def _on_further(self, session_id: bytes, hello: frames.Hello, now_s: float) -> Effects:
        session = self._sessions.admit_channel(session_id, hello, now_s)
        if session is not None:
            return [self.welcome(session)]
        what = f"channel {hello.channel} of no connection here"
        detail = f"{hello.sender}: {what}"
        refusal = frames.Rejected(frames.NO_SESSION, what)
        return [Dropped(DropReason.REFUSED, detail), SendBack(session_id, refusal)]

    def _end_earlier_lives(self, sender: Incarnation) -> Effects:
        """Fail the landings of processes that the sender's node ran before.

        Those of an earlier connection of the same process continue when it begins them again.
        """
        effects: Effects = []
        for earlier in self._sessions.earlier_lives(sender):
            error = HandoffFailed(f"{earlier} restarted")
            effects += self._landings.fail_all(earlier, HandoffStep.FAIL, error)
        return effects

    def _closed(self, session: Session) -> Effects:
        if session.channel:
            return []  # Window and lane are those of the first connection.
        self._windows.drop(session.id)
        return [CloseLane(session.id, session.lane)] if session.lane else []
