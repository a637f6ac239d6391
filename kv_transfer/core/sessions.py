"""The receiver's record of its connections: one session per connection, begun by a valid HELLO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView
from dataclasses import dataclass

from common.errors import Overloaded, PeerProtocolError, StaleEpoch
from common.ids import Incarnation
from common.kv_layout import KVLayout, check_compatible
from kv_transfer.core.frames import Ack, Hello
from kv_transfer.core.limits import MAX_REMEMBERED_EPOCHS, Limits


@dataclass(slots=True)
class Session:
    """One connection: its sender, the agreed lane and verification, its consumed DATA frames.

    `lane` is "" until one was chosen. Of two sessions, the one with the higher `number` is newer.
    """

    id: bytes
    number: int
    sender: Incarnation
    heard_at_s: float
    wanted_verify: str
    window_bytes: int
    can_repeat: bool
    lane: str = ""
    lane_reply: bytes = b""
    verify: str = ""
    num_consumed: int = 0
    unacknowledged_bytes: int = 0
    num_acknowledged: int = 0

    def consume(self, seq: int, num_bytes: int) -> None:
        """Count one DATA frame. Raises `PeerProtocolError` when one is missing before it."""
        if seq != self.num_consumed:
            raise PeerProtocolError(f"DATA frame {seq} arrived: wanted {self.num_consumed}")
        self.num_consumed += 1
        self.unacknowledged_bytes += num_bytes

    def take_ack(self) -> Ack | None:
        """Return the credit that is owed, once."""
        if self.num_acknowledged == self.num_consumed:
            return None
        self.num_acknowledged = self.num_consumed
        self.unacknowledged_bytes = 0
        return self.last_ack()

    def last_ack(self) -> Ack:
        """Return the last credit again: it counts from the start, so repeating is harmless."""
        return Ack(self.num_acknowledged)


class Sessions:
    """All sessions, at most `limits.max_sessions`, and the latest epoch of recent senders."""

    def __init__(self, me: Incarnation, layout: KVLayout, limits: Limits) -> None:
        self._me = me
        self._layout = layout
        self._limits = limits
        self._by_id: dict[bytes, Session] = {}
        self._next_number = 0
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
        self._by_id.pop(session_id, None)

    def admit(self, session_id: bytes, hello: Hello, now_s: float) -> None:
        """Begin a session; a repeated HELLO changes nothing.

        Raises, with a code for the other side, `StaleEpoch` for another incarnation of either node,
        `PeerProtocolError` for a second sender on one connection, and `Overloaded` at the limit of
        sessions or of open files.
        """
        if hello.receiver != self._me:
            raise StaleEpoch(f"HELLO is meant for {hello.receiver}, this is {self._me}")
        latest = self._epochs.get(hello.sender.node_id, 0)
        if hello.sender.epoch < latest:
            raise StaleEpoch(f"HELLO is from {hello.sender}, whose epoch {latest} is known here")
        check_compatible(self._layout, hello.layout)
        known = self._by_id.get(session_id)
        if known is not None and known.sender == hello.sender:
            known.heard_at_s = now_s
            return
        if known is not None:
            raise PeerProtocolError(f"HELLO from {hello.sender} on a connection of {known.sender}")
        if len(self._by_id) >= self._limits.max_sessions:
            raise Overloaded(f"{self._me} has {self._limits.max_sessions} KV connections already")
        if self.is_short_of_files:
            raise Overloaded(f"{self._me} can open no more files for KV connections (ulimit -n)")
        self._epochs[hello.sender.node_id] = hello.sender.epoch
        self._epochs.move_to_end(hello.sender.node_id)
        if len(self._epochs) > MAX_REMEMBERED_EPOCHS:
            self._epochs.popitem(last=False)
        granted = sum(session.window_bytes for session in self._by_id.values())
        window_bytes = self._limits.granted_bytes(granted)
        self._by_id[session_id] = Session(
            id=session_id,
            number=self._next_number,
            sender=hello.sender,
            heard_at_s=now_s,
            wanted_verify=hello.verify,
            window_bytes=window_bytes,
            can_repeat=hello.can_repeat,
        )
        self._next_number += 1

    def hear_all(self, now_s: float) -> None:
        """Restart all deadlines, because this process itself was suspended."""
        for session in self._by_id.values():
            session.heard_at_s = now_s

    def silent(self, now_s: float) -> list[Session]:
        """Return the sessions that were silent for longer than a sender that pings."""
        limit_s = self._limits.peer_timeout_s
        return [s for s in self._by_id.values() if now_s >= s.heard_at_s + limit_s]

    def next_deadline_s(self) -> float | None:
        heard = min((s.heard_at_s for s in self._by_id.values()), default=None)
        return None if heard is None else heard + self._limits.peer_timeout_s
