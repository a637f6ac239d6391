"""Which nodes served each session last: a bounded map that forgets. No I/O, no clock.

A session is what its clients give one name: mostly the turns of one conversation, or of an agent.
The KV of the turns before is on the nodes that served them. The map is a hint and nothing more: a
wrong one costs a miss in a cache, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from common.ids import Incarnation

MAX_SESSIONS = 65_536

SessionId = bytes
"""A digest of a fixed size, made of the name and its owner; empty: the request names no session."""


class SessionNodes(NamedTuple):
    """The nodes of a session's last request, and the tokens of its prompt.

    None: no node of that role has served the session.
    """

    decode: Incarnation | None = None
    prefill: Incarnation | None = None
    num_tokens: int = 0


NO_NODES = SessionNodes()


class Placed(Enum):
    """Where a request of a session was placed, seen from the requests before it."""

    NEW = "new"
    KEPT = "kept"
    MOVED = "moved"


class KnownSessions:
    """The sessions of the last `ttl_s` seconds, at most `max_sessions`.

    The one that was placed longest ago is forgotten first. `now_s` never goes back.
    """

    def __init__(self, ttl_s: float, max_sessions: int = MAX_SESSIONS) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._known: OrderedDict[SessionId, tuple[SessionNodes, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def last(self, session: SessionId, now_s: float) -> SessionNodes:
        """Return the nodes of the session's last request; `NO_NODES` for one that is not known."""
        self.forget(now_s)
        found = self._known.get(session)
        return NO_NODES if found is None else found[0]

    def on_placed(self, session: SessionId, nodes: SessionNodes, now_s: float) -> Placed:
        """Record where a request of the session was placed; a role without one keeps its last."""
        before = self.last(session, now_s)
        now = SessionNodes(
            before.decode if nodes.decode is None else nodes.decode,
            before.prefill if nodes.prefill is None else nodes.prefill,
            nodes.num_tokens,
        )
        self._known[session] = now, now_s
        self._known.move_to_end(session)
        if len(self._known) > self._max_sessions:
            self._known.popitem(last=False)
        if before is NO_NODES:
            return Placed.NEW
        has_moved = _has_moved(before.decode, now.decode) or _has_moved(before.prefill, now.prefill)
        return Placed.MOVED if has_moved else Placed.KEPT

    def forget(self, now_s: float) -> None:
        """Drop the sessions that were not placed for `ttl_s`."""
        known = self._known
        while known and next(iter(known.values()))[1] + self._ttl_s <= now_s:
            known.popitem(last=False)


def _has_moved(before: Incarnation | None, now: Incarnation | None) -> bool:
    return before is not None and before != now
