"""Copies into the pool that are under way, and the blocks of landings that ended meanwhile.

A copy may run on any thread and end at any time. So a landing is not whole, and the blocks of one
that ended are not released, before the last copy that was begun for it has ended.

Two copies of one piece may overlap: after a connection broke, its frames are sent again on another
one. If one copy is damaged, nothing says which of the two wrote last, so the other one, although
its own sum is right, does not count for the *spoiled* blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from kv_transfer.receiving.effects import Write

Lease = tuple[int, int]
"""Token and generation."""


class Copies:
    """Copies by lease."""

    def __init__(self) -> None:
        # With the ordinals of the blocks that are spoiled in each.
        self._under_way: dict[Lease, dict[Write, set[int]]] = {}
        self._held: dict[Lease, tuple[int, ...]] = {}
        self._held_blocks: set[int] = set()

    @property
    def num_held_blocks(self) -> int:
        return len(self._held_blocks)

    def begin(self, write: Write) -> None:
        """Record that this copy may touch the pool from now on."""
        self._under_way.setdefault(_lease(write), {})[write] = set()

    def end(self, write: Write) -> bool:
        """Record that it has ended; return whether that released the blocks of `hold`."""
        lease = _lease(write)
        writes = self._under_way.get(lease)
        if writes is None:
            return False
        del writes[write]
        if writes:
            return False
        del self._under_way[lease]
        return self._release(lease)

    def spoil(self, damaged: Write, ordinals: Set[int]) -> None:
        """Record that a damaged copy may have overwritten these blocks of the other copies."""
        for write, spoiled in self._under_way.get(_lease(damaged), {}).items():
            if write is not damaged and write.data.layer == damaged.data.layer:
                spoiled |= ordinals

    def spoiled(self, write: Write) -> Set[int]:
        """Return the ordinals of the blocks that do not count when this copy ends."""
        return self._under_way.get(_lease(write), {}).get(write, set())

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


def _lease(write: Write) -> Lease:
    return write.data.lease_token, write.data.generation
