"""Which block of a prefix makes room first: a policy, so a bad one costs hits and no more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LeastRecentlyUsed(Generic[K]):
    """The blocks that may be taken, the one that was not used for longest first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[K]:
        return iter(self._blocks)

    def __repr__(self) -> str:
        return f"LeastRecentlyUsed({list(self._blocks)})"

    def use(self, block: K) -> None:
        """Add a block, or note that it was used."""
        self._blocks.pop(block, None)
        self._blocks[block] = None

    def forget(self, block: K) -> None:
        """Remove a block that may not be taken any more; `KeyError` for any other one."""
        del self._blocks[block]

    def first(self) -> K:
        """Return the block to be taken next; `StopIteration` when there is none."""
        return next(iter(self._blocks))
