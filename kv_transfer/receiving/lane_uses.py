"""When the lane of a session that is over may be closed: after the last copy from it, pure."""

from __future__ import annotations

from collections import Counter


class LaneUses:
    """Copies under way by session, and the lanes of sessions that ended meanwhile.

    The methods return the lane to close for the session now, or "" for none.
    """

    def __init__(self) -> None:
        self._num_copies: Counter[bytes] = Counter()
        self._left_open: dict[bytes, str] = {}

    def begin_copy(self, session: bytes) -> None:
        """Record a copy of what a session sent."""
        self._num_copies[session] += 1

    def end_copy(self, session: bytes) -> str:
        """Record that a copy has ended."""
        self._num_copies[session] -= 1
        if self._num_copies[session]:
            return ""
        del self._num_copies[session]
        return self._left_open.pop(session, "")

    def leave(self, session: bytes, lane: str) -> str:
        """Record that a session is over."""
        if session not in self._num_copies:
            return lane
        self._left_open[session] = lane
        return ""

    def open(self, session: bytes, lane: str) -> str:
        """Record the lane of a session, which may have the id of an earlier one.

        If that had the same lane, its end is the lane's business.
        """
        left = self._left_open.pop(session, "")
        return self.leave(session, left) if left and left != lane else ""
