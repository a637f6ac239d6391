"""The bytes that all links of a sender have in flight together, and the most they may have."""

from __future__ import annotations


class SharedWindow:
    """The running sum of all links."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.in_flight_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so much more may be in flight."""
        return num_bytes <= self._most_bytes - self.in_flight_bytes
