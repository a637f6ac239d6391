"""Which transfer of a link sends next: the most important one, and the most urgent of equals."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from kv_transfer.sending.transfer import Transfer

_AT_ONCE = -math.inf, 0.0


class Turns:
    """Transfers with something to send: the highest priority, then the earliest deadline, first.

    One that has only its COMMIT to send requires no room in the window, and goes before all others.

    Transfers that are equal in both take turns, one frame each.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, int]] = []
        # By token the number of its entry, and whether it has pieces; other entries are outdated.
        self._entry_of: dict[int, tuple[int, bool]] = {}
        self._num_entries = 0

    def add(self, transfer: Transfer) -> None:
        """Add a transfer behind its equals, unless it is there."""
        has_pieces = transfer.has_pieces
        queued = self._entry_of.get(transfer.token)
        if queued is not None and queued[1] is has_pieces:
            return
        self._num_entries += 1
        self._entry_of[transfer.token] = self._num_entries, has_pieces
        urgency = (-transfer.priority, transfer.deadline_at_s) if has_pieces else _AT_ONCE
        heapq.heappush(self._heap, (*urgency, self._num_entries, transfer.token))

    def discard(self, token: int) -> None:
        self._entry_of.pop(token, None)

    def clear(self) -> None:
        self._heap.clear()
        self._entry_of.clear()

    def __iter__(self) -> Iterator[int]:
        """Iterate over the tokens, in no order."""
        return iter(self._entry_of)

    def first(self) -> int | None:
        """Return the token of the transfer whose turn it is."""
        while self._heap:
            _, _, entry, token = self._heap[0]
            if self._entry_of.get(token, (0, False))[0] == entry:
                return token
            heapq.heappop(self._heap)
        return None
