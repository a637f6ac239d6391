"""When slots into which a read failed may be used again, pure.

A read that failed may land late. So its slots are moved to a further address, as a slab of
`registered_pool` is: reads that begin from then on go there, and the earlier address is removed
when the reads that began at it are over. Then nothing that was read to it gets into the slots, and
those of the failed reads are free. Reads from other peers do not fail with it, unless both
addresses cannot be had at once.

    reads at address 0 ── one fails ──► move: further ones begin at address 1
              └── the last of the others is over ──► fence: address 0 is removed
"""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto
from typing import Generic, TypeVar

Read = TypeVar("Read")


class Step(Enum):
    """What the lane does next: `MOVE`, then call `moved`; `FENCE`, then call `fenced`."""

    MOVE = auto()
    FENCE = auto()


class ReadFences(Generic[Read]):
    """Reads under way, each told from the others by `==`, and the failed ones that wait."""

    def __init__(self) -> None:
        # Addresses are numbered as they are made; the earlier ones but `_leaving` are removed.
        self._present = 0
        self._leaving: int | None = None
        self._must_wait = False
        self._address_of: dict[Read, int] = {}
        self._num_under_way: Counter[int] = Counter()
        self._failed: dict[int, list[Read]] = {}

    def begin(self, read: Read) -> None:
        """Record a read to the present address."""
        self._address_of[read] = self._present
        self._num_under_way[self._present] += 1

    def end(self, read: Read) -> None:
        """Record that a read is complete."""
        self._take(read)

    def fail(self, read: Read) -> bool:
        """Record that a read failed; return whether its slots are free at once.

        Others are when `fenced` returns them.
        """
        address = self._take(read)
        if address not in (self._present, self._leaving):
            return True
        self._failed.setdefault(address, []).append(read)
        return False

    def next_step(self) -> Step | None:
        """Return what is due; ask again after each step."""
        if self._leaving is None:
            return Step.MOVE if self._present in self._failed else None
        is_read = self._must_wait and self._num_under_way[self._leaving] > 0
        return None if is_read else Step.FENCE

    def moved(self, *, is_beside: bool) -> None:
        """Record a further address; `is_beside`: the earlier one can be read to until the fence."""
        self._leaving, self._must_wait = self._present, is_beside
        self._present += 1

    def fenced(self) -> list[Read]:
        """Record that nothing reaches the earlier address; return the reads it sets free."""
        assert self._leaving is not None, "an address was moved before"
        free = self._failed.pop(self._leaving, [])
        self._leaving = None
        return free

    def _take(self, read: Read) -> int:
        address = self._address_of.pop(read)
        self._num_under_way[address] -= 1
        if not self._num_under_way[address]:
            del self._num_under_way[address]
        return address
