"""Copies into the pool that are under way, and the blocks of landings that ended meanwhile.

A copy may run on any thread and end at any time. So a landing is not whole, and the blocks of one
that ended are not released, before the last copy that was begun for it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

Lease = tuple[int, int]
"""Token and generation."""


class Copies:
    """Numbers of copies by lease."""

    def __init__(self) -> None:
        self._under_way: dict[Lease, int] = {}
        self._held: dict[Lease, tuple[int, ...]] = {}
        self._held_blocks: set[int] = set()

    @property
    def num_held_blocks(self) -> int:
        return len(self._held_blocks)

    def begin(self, lease: Lease) -> None:
        """Record that a copy for this landing may touch the pool from now on."""
        self._under_way[lease] = self._under_way.get(lease, 0) + 1

    def end(self, lease: Lease) -> bool:
        """Record that one has ended; return whether that released the blocks of `hold`."""
        if lease not in self._under_way:
            return False
        self._under_way[lease] -= 1
        if self._under_way[lease]:
            return False
        del self._under_way[lease]
        return self._release(lease)

    def is_under_way(self, lease: Lease) -> bool:
        return lease in self._under_way

    def hold(self, lease: Lease, blocks: Iterable[int]) -> None:
        """Keep the blocks of a landing that ended until its copies have ended."""
        self._held[lease] = tuple(blocks)
        self._held_blocks.update(self._held[lease])

    def holds(self, block: int) -> bool:
        return block in self._held_blocks

    def release_all(self) -> list[int]:
        """Record that every copy has ended; return the tokens whose blocks that released."""
        self._under_way.clear()
        return [lease[0] for lease in list(self._held) if self._release(lease)]

    def _release(self, lease: Lease) -> bool:
        blocks = self._held.pop(lease, None)
        self._held_blocks.difference_update(blocks or ())
        return blocks is not None
