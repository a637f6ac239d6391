"""The receiver's record of its connections: one session per connection, begun by a valid HELLO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView
from dataclasses import dataclass, field

from common.errors import Overloaded, PeerProtocolError, StaleEpoch
from common.ids import Incarnation
from common.kv_layout import KVLayout, check_compatible
from kv_transfer.core.deadlines import Deadlines
from kv_transfer.core.frames import Ack, Hello
from kv_transfer.core.lanes import INLINE_LANES
from kv_transfer.core.limits import MAX_REMEMBERED_EPOCHS, Limits


@dataclass(slots=True)
class Session:
    """One connection: its sender, the agreed lane and verification, its consumed DATA frames.

    `lane` is "" until one was chosen. The sender's window is `window_bytes`, as it was last told;
    one of an earlier release keeps `welcome_bytes`, its first.
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
    num_received: int = 0
    num_consumed: int = 0
    unacknowledged_bytes: int = 0
    num_acknowledged: int = 0
    # Received DATA frames from the first that is still copied: bytes, and whether it is over.
    _copied: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def receive(self, seq: int) -> None:
        """Count one DATA frame. Raises `PeerProtocolError` when one is missing before it."""
        if seq != self.num_received:
            raise PeerProtocolError(f"DATA frame {seq} arrived: wanted {self.num_received}")
        self.num_received += 1

    def consume(self, seq: int, num_bytes: int, *, is_over: bool = True) -> None:
        """Record what became of a received frame; acknowledge it only when its copy `is_over`."""
        self._copied[seq] = num_bytes, is_over
        self._count_copied()

    def copied(self, seq: int) -> None:
        """Record that the copy of a frame is over; of an earlier session's it changes nothing."""
        if seq in self._copied:
            self._copied[seq] = self._copied[seq][0], True
            self._count_copied()

    def _count_copied(self) -> None:
        while self._copied:
            first = next(iter(self._copied))
            num_bytes, is_over = self._copied[first]
            if not is_over:
                return
            del self._copied[first]
            self.num_consumed += 1
            self.unacknowledged_bytes += num_bytes

    @property
    def is_copied(self) -> bool:
        """Whether no received frame waits for a copy."""
        return not self._copied

    @property
    def owes_credit(self) -> bool:
        """Whether an eighth of its sender's window was consumed since the last acknowledgement."""
        return self.unacknowledged_bytes >= min(self.welcome_bytes, self.window_bytes) // 8

    def take_ack(self) -> Ack | None:
        """Return the credit that is owed, once."""
        if self.num_acknowledged == self.num_consumed:
            return None
        self.num_acknowledged = self.num_consumed
        self.unacknowledged_bytes = 0
        return self.last_ack()

    def last_ack(self) -> Ack:
        """Return the last credit again: it counts from the start, so repeating is harmless."""
        return Ack(self.num_acknowledged, self.window_bytes)


class Sessions:
    """All sessions, at most `limits.max_sessions`, and the latest epoch of recent senders.

    A node has one session: its next one replaces it.
    """

    def __init__(self, me: Incarnation, layout: KVLayout, limits: Limits) -> None:
        self._me = me
        self._layout = layout
        self._limits = limits
        self._by_id: dict[bytes, Session] = {}
        self._of_node: dict[str, Session] = {}
        # Times at which a session is silent unless it was heard since.
        self._deadlines: Deadlines[bytes] = Deadlines()
        # The open landings of each sender that has some.
        self._num_landings: dict[Incarnation, int] = {}
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self.is_short_of_files = False

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, session_id: bytes) -> Session | None:
        return self._by_id.get(session_id)

    def all(self) -> list[Session]:
        return list(self._by_id.values())

    def ids(self) -> KeysView[bytes]:
        return self._by_id.keys()

    def drop(self, session_id: bytes) -> None:
        session = self._by_id.pop(session_id, None)
        self._deadlines.discard(session_id)
        if session is not None and self._of_node.get(session.sender.node_id) is session:
            del self._of_node[session.sender.node_id]

    def admit(self, session_id: bytes, hello: Hello, now_s: float) -> Session | None:
        """Begin a session; a repeated HELLO changes nothing.

        Return the session that it replaces, which is over: the same node had it, on an earlier
        connection or in an earlier life.

        Raises, with a code for the other side, `StaleEpoch` for another incarnation of either node,
        `PeerProtocolError` for a second sender on one connection, and `Overloaded` at the limit of
        sessions or of open files.
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
        if earlier is None and len(self._by_id) >= self._limits.max_sessions:
            raise Overloaded(f"{self._me} has {self._limits.max_sessions} KV connections already")
        if earlier is None and self.is_short_of_files:
            raise Overloaded(f"{self._me} can open no more files for KV connections (ulimit -n)")
        self._epochs[hello.sender.node_id] = hello.sender.epoch
        self._epochs.move_to_end(hello.sender.node_id)
        if len(self._epochs) > MAX_REMEMBERED_EPOCHS:
            self._epochs.popitem(last=False)
        if earlier is not None:
            self.drop(earlier.id)
        session = Session(
            id=session_id,
            sender=hello.sender,
            heard_at_s=now_s,
            wanted_verify=hello.verify,
            can_repeat=hello.can_repeat,
        )
        self._by_id[session_id] = self._of_node[hello.sender.node_id] = session
        self._watch(session)
        return earlier

    def hear_all(self, now_s: float) -> None:
        """Restart all deadlines, because this process itself was suspended."""
        for session in self._by_id.values():
            session.heard_at_s = now_s

    def began(self, session: Session) -> None:
        """Record that the sender began a landing: from now on its silence counts."""
        self._num_landings[session.sender] = self._num_landings.get(session.sender, 0) + 1
        self._watch(session)

    def ended(self, sender: Incarnation) -> None:
        """Record that a landing that the sender began is closed."""
        self._num_landings[sender] -= 1
        if not self._num_landings[sender]:
            del self._num_landings[sender]

    def take_silent(self, now_s: float) -> list[Session]:
        """Return the sessions that were silent for longer than a sender that pings."""
        due = [self._by_id[session_id] for session_id in self._deadlines.take_due(now_s)]
        for session in due:
            self._watch(session)
        return [one for one in due if now_s >= one.heard_at_s + self._patience_s(one)]

    def quiet_s(self, session: Session) -> int:
        """Return how long its sender may say nothing without a landing.

        0 where the lane keeps memory for it, or where a fence waits for its report.
        """
        return self._limits.quiet_s if session.lane in INLINE_LANES else 0

    def next_deadline_s(self) -> float | None:
        """Return when to call `take_silent`."""
        return self._deadlines.next_s()

    def _watch(self, session: Session) -> None:
        self._deadlines.set_no_later(session.id, session.heard_at_s + self._patience_s(session))

    def _patience_s(self, session: Session) -> float:
        is_idle = session.sender not in self._num_landings
        return (is_idle and self.quiet_s(session)) or self._limits.peer_timeout_s
