"""The receiver's record of its connections: one session per connection, begun by a valid HELLO.

What all senders may have unacknowledged is divided among those that send.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import KeysView
from dataclasses import dataclass, field

from common.errors import Overloaded, PeerProtocolError, StaleEpoch
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout, check_compatible
from kv_transfer.shared.deadlines import Deadlines, earliest_s
from kv_transfer.shared.lanes import INLINE_LANES
from kv_transfer.shared.limits import (
    BESIDE_WINDOWS,
    MAX_FRAMES_IN_FLIGHT,
    MAX_REMEMBERED_EPOCHS,
    Limits,
)
from kv_transfer.wire.frames import Ack, Hello


@dataclass(slots=True)
class Session:
    """One connection: its sender, the agreed lane and verification, its consumed DATA frames.

    `lane` is "" until one was chosen. The sender's window is `window_bytes`, as it was last sent;
    one of an earlier release keeps `welcome_bytes`, its first. `number` counts the connections of
    its sender; 0: it does not count them.

    A sender may have `num_channels` connections. `channel` is which of them this one is, and `main`
    the id of the first one, which alone carries other frames than DATA and PING.
    """

    id: bytes
    sender: Incarnation
    heard_at_s: float
    wanted_verify: str
    can_repeat: bool
    welcome_bytes: int = 0
    window_bytes: int = 0
    lane: str = ""
    lane_reply: bytes = b""
    verify: str = ""
    number: int = 0
    channel: int = 0
    main: bytes = b""
    num_channels: int = 1
    num_consumed: int = 0
    num_finished: int = 0
    unfinished_bytes: int = 0
    unacknowledged_bytes: int = 0
    num_acknowledged: int = 0
    # The sender waits for credit for so many frames.
    num_wanted: int = 0
    # The bytes of each frame from `num_finished` on, and which of these have finished.
    _sizes: deque[int] = field(default_factory=deque)
    _finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.main = self.main or self.id

    def further(self, session_id: bytes, channel: int, now_s: float) -> Session:
        """Return the session of a further connection of this one's sender."""
        return Session(
            id=session_id,
            sender=self.sender,
            heard_at_s=now_s,
            wanted_verify=self.wanted_verify,
            can_repeat=self.can_repeat,
            welcome_bytes=self.welcome_bytes,
            window_bytes=self.window_bytes,
            lane=self.lane,
            verify=self.verify,
            channel=channel,
            main=self.id,
            num_channels=self.num_channels,
        )

    def consume(self, seq: int, num_bytes: int, *, wants_ack: bool) -> None:
        """Take one DATA frame.

        Raises `PeerProtocolError` when one is missing before it, and for one too many.
        """
        if seq != self.num_consumed:
            raise PeerProtocolError(f"DATA frame {seq} arrived: wanted {self.num_consumed}")
        if self.num_consumed - self.num_finished >= MAX_FRAMES_IN_FLIGHT:
            raise PeerProtocolError(
                f"DATA frame {seq} arrived: wanted at most {MAX_FRAMES_IN_FLIGHT} unacknowledged"
            )
        self.num_consumed += 1
        self.unfinished_bytes += num_bytes
        self._sizes.append(num_bytes)
        if wants_ack:
            self.num_wanted = self.num_consumed

    def finish(self, seq: int) -> None:
        """Record that a DATA frame was copied or dropped, so that it occupies no memory any more.

        Frames finish in any order and are acknowledged in the order of their arrival.
        """
        self._finished.add(seq)
        while self.num_finished in self._finished:
            self._finished.discard(self.num_finished)
            self.num_finished += 1
            num_bytes = self._sizes.popleft()
            self.unfinished_bytes -= num_bytes
            self.unacknowledged_bytes += num_bytes

    @property
    def is_ack_due(self) -> bool:
        """Whether an eighth of its sender's window is credit again, or the sender waits for it."""
        is_much = self.unacknowledged_bytes >= min(self.welcome_bytes, self.window_bytes) // 8
        return is_much or self.num_acknowledged < self.num_wanted <= self.num_finished

    def take_ack(self) -> Ack | None:
        """Return the credit that is owed, once."""
        if self.num_acknowledged == self.num_finished:
            return None
        self.num_acknowledged = self.num_finished
        self.unacknowledged_bytes = 0
        return self.last_ack()

    def last_ack(self) -> Ack:
        """Return the last credit again: it counts from the start, so repeating is harmless."""
        return Ack(self.num_acknowledged, self.window_bytes)


class Sessions:
    """All sessions, at most `limits.max_sessions`, and the latest epoch of recent senders.

    A node has one session, with its further connections: its next one replaces them.
    """

    def __init__(self, me: Incarnation, layout: KVLayout, limits: Limits) -> None:
        self._me = me
        self._layout = layout
        self._limits = limits
        self._by_id: dict[bytes, Session] = {}
        self._of_node: dict[str, Session] = {}
        # Times at which a session is silent unless it was heard since.
        self._deadlines: Deadlines[bytes] = Deadlines()
        # The open landings of each sender that has some, by the id of its node.
        self._num_landings: dict[str, dict[Incarnation, int]] = {}
        # The further connections of a session, by the id of its first.
        self._channels: dict[bytes, dict[int, Session]] = {}
        # When senders with landings whose connection was ended here must have opened another.
        self._awaited: Deadlines[Incarnation] = Deadlines()
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self.is_short_of_files = False

    def __len__(self) -> int:
        return len(self._of_node)

    def get(self, session_id: bytes) -> Session | None:
        return self._by_id.get(session_id)

    def all(self) -> list[Session]:
        return list(self._by_id.values())

    def ids(self) -> KeysView[bytes]:
        return self._by_id.keys()

    def drop(self, session_id: bytes) -> None:
        """Forget a session; with the first connection of a sender also its further ones."""
        session = self._by_id.pop(session_id, None)
        self._deadlines.discard(session_id)
        if session is None:
            return
        if session.channel:
            self._channels[session.main].pop(session.channel)
            return
        for channel in self._channels.pop(session_id, {}).values():
            del self._by_id[channel.id]
        if self._of_node.get(session.sender.node_id) is session:
            del self._of_node[session.sender.node_id]

    def hear(self, session: Session, now_s: float) -> None:
        """Record a frame of the session: its sender lives, and so do its other connections."""
        session.heard_at_s = now_s
        if session.channel:
            self._by_id[session.main].heard_at_s = now_s

    def admit(self, session_id: bytes, hello: Hello, now_s: float) -> Session | None:
        """Begin a session; a repeated HELLO changes nothing.

        Return the session that it replaces, which is over: the same node had it, on an earlier
        connection or in an earlier life.

        Raises, with a code for the other side, `StaleEpoch` for another incarnation of either node
        and for a connection that its sender began before the one that it has, `PeerProtocolError`
        for a second sender on one connection, and `Overloaded` at the limit of sessions or of open
        files.
        """
        if hello.receiver != self._me:
            raise StaleEpoch(f"HELLO is meant for {hello.receiver}, this is {self._me}")
        earlier = self._of_node.get(hello.sender.node_id)
        latest = self._epochs.get(hello.sender.node_id, earlier.sender.epoch if earlier else 0)
        if hello.sender.epoch < latest:
            raise StaleEpoch(f"HELLO is from {hello.sender}, whose epoch {latest} is known here")
        check_compatible(self._layout, hello.layout)
        known = self._by_id.get(session_id)
        if known is not None and known.sender == hello.sender:
            known.heard_at_s = now_s
            return None
        if known is not None:
            raise PeerProtocolError(f"HELLO from {hello.sender} on a connection of {known.sender}")
        if earlier and earlier.sender == hello.sender and 0 < hello.number < earlier.number:
            raise StaleEpoch(
                f"HELLO is from connection {hello.number} of {hello.sender}, "
                f"which has connection {earlier.number}"
            )
        if earlier is None and len(self) >= self._limits.max_sessions:
            raise Overloaded(f"{self._me} has {self._limits.max_sessions} KV connections already")
        if earlier is None and self.is_short_of_files:
            raise Overloaded(f"{self._me} can open no more files for KV connections (ulimit -n)")
        self._epochs[hello.sender.node_id] = hello.sender.epoch
        self._epochs.move_to_end(hello.sender.node_id)
        if len(self._epochs) > MAX_REMEMBERED_EPOCHS:
            self._epochs.popitem(last=False)
        if earlier is not None:
            self.drop(earlier.id)
        max_channels = 1 if self.is_short_of_files else self._limits.max_channels
        session = Session(
            id=session_id,
            sender=hello.sender,
            heard_at_s=now_s,
            wanted_verify=hello.verify,
            can_repeat=hello.can_repeat,
            number=hello.number,
            num_channels=max(1, min(hello.num_channels, max_channels)),
        )
        self._by_id[session_id] = self._of_node[hello.sender.node_id] = session
        self._awaited.discard(hello.sender)
        self.watch(session)
        return earlier

    def admit_channel(self, session_id: bytes, hello: Hello, now_s: float) -> Session | None:
        """Return the session of a further connection; None without such a first one, or files.

        It replaces an earlier one of the same channel. A repeated HELLO changes nothing.
        """
        main = self._by_id.get(hello.group)
        if main is None or main.sender != hello.sender or main.channel or not main.lane:
            return None
        if hello.channel >= main.num_channels:
            return None
        channels = self._channels.setdefault(main.id, {})
        earlier, known = channels.get(hello.channel), self._by_id.get(session_id)
        if known is not None:
            return known if known is earlier else None
        if self.is_short_of_files:
            return None
        if earlier is not None:
            self.drop(earlier.id)
        session = main.further(session_id, hello.channel, now_s)
        self._by_id[session_id] = channels[hello.channel] = session
        return session

    def check_window(self, session: Session, num_bytes: int) -> None:
        """Raise `PeerProtocolError` for a frame of `num_bytes` far outside the pair's window.

        Twice the configured window and a frame pass: a share of it that was granted before counts
        until its bytes have arrived, some lanes have two windows, and frames of a connection that
        broke are sent again on another one.
        """
        main = self._by_id[session.main]
        pair = [main, *self._channels.get(main.id, {}).values()]
        unfinished_bytes = sum(one.unfinished_bytes for one in pair)
        most_bytes = BESIDE_WINDOWS * self._limits.window_bytes
        if unfinished_bytes > most_bytes + num_bytes:
            raise PeerProtocolError(
                f"DATA of {num_bytes} bytes behind {unfinished_bytes} unacknowledged ones: "
                f"wanted at most {most_bytes} of them"
            )

    def hear_all(self, now_s: float) -> None:
        """Restart all deadlines, because this process itself was suspended."""
        for session in self._by_id.values():
            session.heard_at_s = now_s
        for sender in self._awaited.take_due(math.inf):
            self._awaited.set_no_later(sender, now_s + self._limits.peer_timeout_s)

    def began(self, session: Session) -> None:
        """Record that the sender began a landing: from now on its silence counts."""
        lives = self._num_landings.setdefault(session.sender.node_id, {})
        lives[session.sender] = lives.get(session.sender, 0) + 1
        self.watch(session)

    def ended(self, sender: Incarnation) -> None:
        """Record that a landing that the sender began is closed."""
        lives = self._num_landings[sender.node_id]
        lives[sender] -= 1
        if not lives[sender]:
            del lives[sender]
            self._awaited.discard(sender)
        if not lives:
            del self._num_landings[sender.node_id]

    def earlier_lives(self, sender: Incarnation) -> list[Incarnation]:
        """Return the other lives of a sender's node that have landings."""
        return [one for one in self._num_landings.get(sender.node_id, ()) if one != sender]

    def await_again(self, session: Session) -> None:
        """Drop a session whose sender is asked to connect again, before it counts as silent."""
        self.drop(session.id)
        if not session.channel and self._has_landings(session.sender):
            at_s = session.heard_at_s + self._limits.peer_timeout_s
            self._awaited.set_no_later(session.sender, at_s)

    def take_missing(self, now_s: float) -> list[Incarnation]:
        """Return the senders of `await_again` that did not connect in time."""
        return self._awaited.take_due(now_s)

    def take_silent(self, now_s: float) -> list[Session]:
        """Return the sessions that were silent for longer than a sender that pings."""
        due = [self._by_id[session_id] for session_id in self._deadlines.take_due(now_s)]
        for session in due:
            self.watch(session)
        return [one for one in due if now_s >= one.heard_at_s + self.patience_s(one)]

    def patience_s(self, session: Session) -> float:
        """Return how long its sender may say nothing: on some lanes longer without a landing.

        A sender that may write by itself has no longer time without one: what it wrote before may
        be in quarantine, and if it lives, it connects again.
        """
        is_idle = not self._has_landings(session.sender)
        return (is_idle and self.quiet_s(session)) or self._limits.patience_s(session.lane)

    def watch(self, session: Session) -> None:
        """Look whether it is silent no later than its present patience ends."""
        self._deadlines.set_no_later(session.id, session.heard_at_s + self.patience_s(session))

    def quiet_s(self, session: Session) -> int:
        """Return how long its sender may say nothing without a landing.

        0 where the lane keeps memory for it, or where a fence waits for its report.
        """
        return self._limits.quiet_s if session.lane in INLINE_LANES else 0

    def next_deadline_s(self) -> float | None:
        """Return when to call `take_silent` and `take_missing`."""
        return earliest_s(self._deadlines.next_s(), self._awaited.next_s())

    def _has_landings(self, sender: Incarnation) -> bool:
        return sender in self._num_landings.get(sender.node_id, ())


ACTIVE_S = 1.0
"""A sender shares the bound as long after its last DATA frame."""


class WindowShares:
    """The receiver's bound, divided equally among the connections that send.

    A connection learns its share with WELCOME and with each acknowledgement. It is never less than
    two frames, so a sender is never stopped.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # When each connection sent last, the earliest first.
        self._sent_at_s: OrderedDict[bytes, float] = OrderedDict()

    def sent(self, session_id: bytes, now_s: float) -> None:
        """Record a DATA frame."""
        self._sent_at_s[session_id] = now_s
        self._sent_at_s.move_to_end(session_id)

    def drop(self, session_id: bytes) -> None:
        """Leave the share of a connection that is over to the others."""
        self._sent_at_s.pop(session_id, None)

    def share_bytes(self, session_id: bytes, now_s: float) -> int:
        """Return the share of a connection, which sends now or is about to."""
        while self._sent_at_s and next(iter(self._sent_at_s.values())) < now_s - ACTIVE_S:
            self._sent_at_s.popitem(last=False)
        num_active = len(self._sent_at_s) + (session_id not in self._sent_at_s)
        share_bytes = self._limits.node_window_bytes // num_active
        return max(self._limits.least_window_bytes, min(self._limits.window_bytes, share_bytes))
