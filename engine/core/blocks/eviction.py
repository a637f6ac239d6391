"""Which host block of a prefix makes room first: a policy, so a bad one costs hits and no more."""

from __future__ import annotations

from collections.abc import Iterator


class LeastRecentlyUsed:
    """The blocks that may be taken, the one that was not used for longest first."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __repr__(self) -> str:
        return f"LeastRecentlyUsed({list(self._blocks)})"

    def use(self, block_id: int) -> None:
        """Add a block, or note that it was used."""
        self._blocks.pop(block_id, None)
        self._blocks[block_id] = None

    def forget(self, block_id: int) -> None:
        """Remove a block that may not be taken any more; `KeyError` for any other one."""
        del self._blocks[block_id]

    def first(self) -> int:
        """Return the block to be taken next; `StopIteration` when there is none."""
        return next(iter(self._blocks))
