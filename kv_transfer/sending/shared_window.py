"""The window that all links of a sender share."""

from __future__ import annotations


class SharedWindow:
    """The bytes that all links of a sender have in flight together, and each link's part of them.

    Each link may have as much in flight as is left for all (a dynamic threshold, as in the shared
    buffers of network switches). One link alone uses its whole window. Links that do not
    acknowledge hold what they took, and a part of the rest is left for others. Two frames per link
    do not count: however many peers are slow, another one keeps its frames coming.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.in_flight_bytes = 0

    def has_room(self, own_bytes: int, num_bytes: int) -> bool:
        """Return whether a link with `own_bytes` in flight may add `num_bytes`."""
        return own_bytes + num_bytes <= self._most_bytes - self.in_flight_bytes
