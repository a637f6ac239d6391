"""The window that all links of a sender share. Pure."""

from __future__ import annotations


class NodeWindow:
    """The bytes that all links of a sender have in flight together, and the most they may have."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.in_flight_bytes = 0

    @property
    def left_bytes(self) -> int:
        return self._most_bytes - self.in_flight_bytes
