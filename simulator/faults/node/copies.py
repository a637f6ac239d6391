"""Copies of blocks beside the steps, as a device makes them.

A copy reads its source as late as it may, and its target holds no valid numbers until it ends: code
that writes the source, or uses the target, before that end is found. Copies end in the order of
their begin, each a while after the one before it.

An error that a copy raises is taken for its failure. So a violation is kept, for the checks of the
node.
"""

from __future__ import annotations

from collections import deque

from common.errors import InternalError
from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from simulator.faults.contents import KVMemory
from simulator.faults.hosts import ProcessClock

STEPS_PER_COPY = 1.0


class LateCopies:
    """The copies of one node."""

    def __init__(self, clock: ProcessClock, memory: KVMemory, step_s: float) -> None:
        self._clock = clock
        self._memory = memory
        self._span_s = STEPS_PER_COPY * step_s
        self._begun: deque[_Copy] = deque()
        self._free_at_s = 0.0
        self.is_failing = False
        self.wrong = ""
        """The violation of a copy; empty: none."""

    def begin(self, copy: CacheCopy) -> _Copy:
        """Begin a copy. Raises `InternalError` while copies fail, after writing wrong numbers."""
        self.look()
        if copy.kind is CopyKind.SWAP_OUT:
            used = {one for begun in self._begun for one in begun.copy.host_block_ids}
            self._check_unused("host block", used.intersection(copy.host_block_ids))
        elif not copy.kind.is_out:
            used = {one for begun in self._begun for one in begun.copy.block_ids}
            self._check_unused("block", used.intersection(copy.block_ids))
        if copy.kind is CopyKind.SWAP_OUT:
            self._memory.spoil_host(copy.host_block_ids)
        elif not copy.kind.is_out:
            self._memory.spoil(copy.block_ids)
        if self.is_failing:
            raise InternalError("a copy has failed")
        self._free_at_s = max(self._clock.now_s(), self._free_at_s) + self._span_s
        begun = _Copy(self, copy, self._free_at_s)
        self._begun.append(begun)
        return begun

    def _check_unused(self, what: str, used: set[int]) -> None:
        if used:
            self.wrong = f"{what} {min(used)} is written while a copy uses it"

    def look(self) -> None:
        """End the copies whose time has passed."""
        now_s = self._clock.now_s()
        while self._begun and self._begun[0].ends_at_s <= now_s:
            ended = self._begun.popleft()
            self._make(ended.copy)
            ended.has_ended = True

    def _make(self, copy: CacheCopy) -> None:
        memory, blocks = self._memory, copy.block_ids
        match copy.kind:
            case CopyKind.STAGE_IN:
                memory.stage_in(blocks)
            case CopyKind.STAGE_OUT:
                memory.stage_out(blocks)
            case CopyKind.SWAP_IN:
                memory.swap_in(copy.host_block_ids, blocks)
            case CopyKind.SWAP_OUT:
                memory.swap_out(blocks, copy.host_block_ids)


class _Copy:
    """A copy that was begun."""

    def __init__(self, copies: LateCopies, copy: CacheCopy, ends_at_s: float) -> None:
        self._copies = copies
        self.copy = copy
        self.ends_at_s = ends_at_s
        self.has_ended = False

    def is_done(self, *, may_begin: bool = True) -> bool:
        """Return whether the copy has ended."""
        self._copies.look()
        return self.has_ended
