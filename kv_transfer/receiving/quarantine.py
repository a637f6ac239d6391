"""Blocks of landings that ended while a sender on a one-sided lane may still write them.

They are released when that sender has reported, on the connection where it wrote, that it stopped;
or when that connection is over and the slabs that hold them were fenced since (`slab_fences`).
Never on a timer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kv_transfer.receiving.landing import Landing
from kv_transfer.shared.handshake import HandoffStep


@dataclass(frozen=True, slots=True)
class _Entry:
    """A landing that ended; `slabs` are those of its blocks that were not fenced since."""

    landing: Landing
    session: bytes
    lane: str
    slabs: set[int]

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.landing.ticket.target_block_ids


class Quarantine:
    """Quarantined blocks by lease token.

    A slab is `blocks_per_slab` blocks of the pool that are fenced together.
    """

    def __init__(self, blocks_per_slab: int) -> None:
        self._blocks_per_slab = blocks_per_slab
        self._entries: dict[int, _Entry] = {}
        self._blocks: set[int] = set()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def sessions(self) -> dict[int, bytes]:
        """Return the connection on which each lease was written, by its token."""
        return {token: entry.session for token, entry in self._entries.items()}

    def add(self, landing: Landing, session: bytes, lane: str) -> None:
        """Keep the blocks of a landing that was begun on `session`."""
        landing.advance(HandoffStep.QUARANTINE)
        blocks = landing.ticket.target_block_ids
        slabs = {block // self._blocks_per_slab for block in blocks}
        self._entries[landing.token] = _Entry(landing, session, lane, slabs)
        self._blocks.update(blocks)

    def holds(self, block: int) -> bool:
        return block in self._blocks

    def release(self, token: int, generation: int, session: bytes) -> bool:
        """Release the blocks of a lease whose sender has stopped writing.

        Returns False unless this is the connection on which it wrote.
        """
        entry = self._entries.get(token)
        if entry is None or entry.session != session:
            return False
        if entry.landing.ticket.generation != generation:
            return False
        self._remove(token)
        return True

    def next_slab(self, live_sessions: Iterable[bytes], *, after: int) -> tuple[str, int] | None:
        """Return the lane and the slab to fence next, in turn `after` the last; None: none is due.

        A slab is due when it has blocks of a sender whose connection is over.
        """
        live = set(live_sessions)
        due = [
            (entry.lane, slab)
            for entry in self._entries.values()
            if entry.session not in live
            for slab in entry.slabs
        ]
        return min(due, key=lambda one: (one[1] <= after, one[1]), default=None)

    def left_by_the_dead(self, lane: str, slab: int, live_sessions: Iterable[bytes]) -> list[int]:
        """Return the leases with blocks in `slab` whose senders' connections are over."""
        live = set(live_sessions)
        return [
            token
            for token, entry in self._entries.items()
            if entry.lane == lane and slab in entry.slabs and entry.session not in live
        ]

    def fenced(self, slab: int, tokens: Iterable[int]) -> list[int]:
        """Record that no write of these leases reaches `slab`; return those that are free now."""
        free: list[int] = []
        for token in tokens:
            entry = self._entries.get(token)
            if entry is not None:
                entry.slabs.discard(slab)
                if not entry.slabs:
                    free.append(token)
        for token in free:
            self._remove(token)
        return free

    def release_all(self) -> list[int]:
        """Record that no sender can write the pool; return the tokens that are free now."""
        tokens = list(self._entries)
        for token in tokens:
            self._remove(token)
        return tokens

    def _remove(self, token: int) -> None:
        entry = self._entries.pop(token)
        self._blocks.difference_update(entry.blocks)
        entry.landing.advance(HandoffStep.RELEASE)
