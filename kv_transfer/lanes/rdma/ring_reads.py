"""The reads out of other nodes' rings, pure: from each in order, failed ones until they are free.

Nothing is read from a source after one read from it failed: those behind it fail with it, and its
session ends. See `read_fences` for when the slots of a failed read may be used again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.errors import HandoffFailed
from kv_transfer.lanes.rdma.read_fences import ReadFences, Step

Read = TypeVar("Read")


@dataclass(eq=False, slots=True)
class RingSource(Generic[Read]):
    """What a session reads from. `error`: a read failed; `pending` are its reads, in order."""

    pending: deque[Read] = field(default_factory=deque)
    error: HandoffFailed | None = None


Failed = tuple[Read, HandoffFailed]
"""A read whose slots are free, and why it failed."""


class RingReads(Generic[Read]):
    """Reads under way from all sources, each told from the others by `==`."""

    def __init__(self) -> None:
        self._fences: ReadFences[Read] = ReadFences()
        self._error_of: dict[Read, HandoffFailed] = {}

    def begin(self, source: RingSource[Read], read: Read) -> None:
        """Record a read to the present address, behind those of its source."""
        self._fences.begin(read)
        source.pending.append(read)

    def end(self, source: RingSource[Read], read: Read) -> None:
        """Record that the first read of a source is complete."""
        first = source.pending.popleft()  # one that failed first is not heard any more
        assert first == read, "reads end in their order"
        self._fences.end(read)

    def fail(self, source: RingSource[Read], error: HandoffFailed) -> list[Failed[Read]]:
        """Give a source up; return those of its reads that can reach nothing any more."""
        source.error = error
        reads = list(source.pending)
        source.pending.clear()
        free = [read for read in reads if self._fences.fail(read)]
        self._error_of |= dict.fromkeys(set(reads).difference(free), error)
        return [(read, error) for read in free]

    def next_step(self) -> Step | None:
        """Return what is due; ask again after each step."""
        return self._fences.next_step()

    def moved(self, *, is_beside: bool) -> None:
        """Record a further address: see `ReadFences.moved`."""
        self._fences.moved(is_beside=is_beside)

    def fenced(self) -> list[Failed[Read]]:
        """Record that nothing reaches the earlier address; return the reads it sets free."""
        return [(read, self._error_of.pop(read)) for read in self._fences.fenced()]
