"""How many bytes each sender of a receiver may have unacknowledged."""

from __future__ import annotations

from collections import OrderedDict

from kv_transfer.shared.limits import Limits

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
