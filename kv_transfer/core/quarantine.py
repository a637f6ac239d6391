"""Blocks of landings that ended while a sender on a one-sided lane may still write them.

They are released when that sender has reported, on the connection where it wrote, that it stopped;
or when that connection is over and the slabs that hold them were fenced. A fence stops every writer
of a slab, so it waits until no landing that may be written is in it. Never on a timer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kv_transfer.core.handshake import HandoffStep
from kv_transfer.core.landing import Landing


@dataclass(frozen=True, slots=True)
class _Entry:
    landing: Landing
    session: bytes
    lane: str
    blocks: frozenset[int]
    slabs: frozenset[int]


class Quarantine:
    """Quarantined blocks by lease token.

    A slab is `blocks_per_slab` blocks of the pool that are fenced together.
    """

    def __init__(self, blocks_per_slab: int) -> None:
        self._blocks_per_slab = blocks_per_slab
        self._entries: dict[int, _Entry] = {}

    @property
    def num_blocks(self) -> int:
        return sum(len(entry.blocks) for entry in self._entries.values())

    def add(self, landing: Landing, session: bytes, lane: str) -> None:
        """Keep the blocks of a landing that was begun on `session`."""
        landing.advance(HandoffStep.QUARANTINE)
        blocks = frozenset(landing.ticket.target_block_ids)
        slabs = frozenset(self._slabs_of(blocks))
        self._entries[landing.token] = _Entry(landing, session, lane, blocks, slabs)

    def holds(self, block: int) -> bool:
        return any(block in entry.blocks for entry in self._entries.values())

    def release(self, token: int, generation: int, session: bytes) -> bool:
        """Release a lease's blocks, because its sender writes no more.

        Returns False unless this is the connection on which it wrote.
        """
        entry = self._entries.get(token)
        if entry is None or entry.session != session:
            return False
        if entry.landing.ticket.generation != generation:
            return False
        self._remove(token)
        return True

    def due(self, live_sessions: Iterable[bytes], written: Iterable[int]) -> dict[str, list[int]]:
        """Return the slabs to fence now, ordered, by lane.

        `written` are the blocks of open landings that may be written.
        """
        live = set(live_sessions)
        busy = set(self._slabs_of(written))
        for entry in self._entries.values():
            if entry.session in live:
                busy |= entry.slabs
        due: dict[str, set[int]] = {}
        for entry in self._entries.values():
            if not entry.slabs & busy:
                due.setdefault(entry.lane, set()).update(entry.slabs)
        return {lane: sorted(slabs) for lane, slabs in due.items()}

    def fenced(self, lane: str, slabs: Iterable[int]) -> list[int]:
        """Record that no earlier write can reach `slabs`; return the tokens that are free now."""
        clean = set(slabs)
        tokens = [
            token
            for token, entry in self._entries.items()
            if entry.lane == lane and entry.slabs <= clean
        ]
        for token in tokens:
            self._remove(token)
        return tokens

    def release_all(self) -> list[int]:
        """Record that no sender can write the pool; return the tokens that are free now."""
        tokens = list(self._entries)
        for token in tokens:
            self._remove(token)
        return tokens

    def _remove(self, token: int) -> None:
        self._entries.pop(token).landing.advance(HandoffStep.RELEASE)

    def _slabs_of(self, blocks: Iterable[int]) -> set[int]:
        return {block // self._blocks_per_slab for block in blocks}
