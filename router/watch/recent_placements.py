"""The last placements of a router, each with its outcome. Bounded; has no clock and no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from common.ids import AttemptId, Incarnation

NUM_RECENT_PLACEMENTS = 256
REFUSED = "refused"
"""The outcome of an attempt whose prefill node refused, and that was placed on another one."""
RETRIED = "retried"
"""The outcome of an attempt whose tokens were not used: another one answered."""


@dataclass(slots=True, eq=False, kw_only=True)
class RecentPlacement:
    """One attempt of a choice, on the nodes it was placed on. Times are of the router's clock.

    `request_id` is the `x-request-id` of the client's request. `outcome` is empty while the
    attempt is in progress, then a finish reason, `REFUSED`, `RETRIED` or an error's code.
    `num_tokens` are the output tokens of the choice, `duration_s` the time since the choice began;
    both are set when the choice ends. `change` orders the entries by their last change.
    """

    attempt: AttemptId
    request_id: str
    decode: Incarnation | None
    prefill: Incarnation | None
    reason: str
    at_s: float
    outcome: str = ""
    num_tokens: int = 0
    duration_s: float | None = None
    change: int = 0


class RecentPlacements:
    """The latest `NUM_RECENT_PLACEMENTS`, oldest first."""

    def __init__(self) -> None:
        self._entries: deque[RecentPlacement] = deque(maxlen=NUM_RECENT_PLACEMENTS)
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RecentPlacement]:
        return iter(self._entries)

    def __reversed__(self) -> Iterator[RecentPlacement]:
        return reversed(self._entries)

    def add(self, entry: RecentPlacement) -> None:
        """Add a placement; the oldest one leaves when there are too many."""
        self._note_change(entry)
        self._entries.append(entry)

    def end(
        self, entry: RecentPlacement, outcome: str, *, duration_s: float, num_tokens: int = 0
    ) -> None:
        """Record how an attempt ended."""
        entry.outcome, entry.num_tokens, entry.duration_s = outcome, num_tokens, duration_s
        self._note_change(entry)

    def changed_since(self, change: int) -> list[RecentPlacement]:
        """Return the entries that were added or ended after `num_changes` was `change`."""
        return [entry for entry in self._entries if entry.change > change]

    def _note_change(self, entry: RecentPlacement) -> None:
        self.num_changes += 1
        entry.change = self.num_changes
