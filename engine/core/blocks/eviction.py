"""Which block of a prefix makes room first: a policy, so a bad one costs hits only.

`docs/policies.md` compares these orders with others, by replayed traces.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain, islice
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

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._blocks)

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


class Segments(Generic[K]):
    """The blocks that may be taken, in three segments, in each by their latest use.

    Blocks that were copied *elsewhere* go first. Blocks that were used *once* go while it is more
    than `most_once`, so that what comes once, however much of it, takes no more room than that from
    what was used *again*. That goes then, and the rest of what was used once last.
    """

    def __init__(self, most_once: int) -> None:
        self.most_once = most_once
        self._elsewhere: LeastRecentlyUsed[K] = LeastRecentlyUsed()
        self._once: LeastRecentlyUsed[K] = LeastRecentlyUsed()
        self._again: LeastRecentlyUsed[K] = LeastRecentlyUsed()

    def __len__(self) -> int:
        return len(self._elsewhere) + len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[K]:
        return self.in_order()

    def __repr__(self) -> str:
        return f"Segments({self._elsewhere}, {self._once}, {self._again})"

    @property
    def num_elsewhere(self) -> int:
        """Blocks that are elsewhere too."""
        return len(self._elsewhere)

    @property
    def num_once(self) -> int:
        """Blocks that were used once."""
        return len(self._once)

    def in_order(self, num_new: int = 0) -> Iterator[K]:
        """Return the blocks, the first to be taken first, for `num_new` that were used once."""
        num_first = max(len(self._once) + num_new - self.most_once, 0)
        first, rest = islice(self._once, num_first), islice(self._once, num_first, None)
        return chain(self._elsewhere, first, self._again, rest)

    def latest(self) -> Iterator[K]:
        """Return the blocks, the one that was used last first; those used once come last."""
        return chain(reversed(self._elsewhere), reversed(self._again), reversed(self._once))

    def add(self, block: K) -> None:
        """Add a block that was used once."""
        self._once.use(block)

    def use(self, block: K) -> None:
        """Add a block that was used again, or note that it was."""
        self._discard(block)
        self._again.use(block)

    def use_elsewhere(self, block: K) -> None:
        """Add a block that was used again and is elsewhere too."""
        self._discard(block)
        self._elsewhere.use(block)

    def forget(self, block: K) -> None:
        """Remove a block that may not be taken any more; `KeyError` for any other one."""
        if not self._discard(block):
            raise KeyError(block)

    def _discard(self, block: K) -> bool:
        for segment in (self._elsewhere, self._once, self._again):
            if block in segment:
                segment.forget(block)
                return True
        return False
