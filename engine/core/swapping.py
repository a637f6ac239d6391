"""KV of preempted sequences in host memory: copied out at preemption, copied back at admission.

Where steps compute in host memory, a step's copies are made before it runs. Where they compute on a
device the copies are *late*: they are made beside the steps, in the order in which they were begun.
Until a late copy has ended, its blocks and its host blocks are held, whatever becomes of the
sequence.
"""

from __future__ import annotations

from common.kv.blocks import blocks_for
from engine.core.blocks.block_pool import BlockPool
from engine.core.blocks.host_pool import HostPool
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.step.step_in_flight import BlockCopy, PlannedStep, SwapCopy


class Swapping:
    """The block copies of a step between the cache and the host `pool`."""

    def __init__(
        self, pool: HostPool, block_size: int, *, is_enabled: bool = True, is_late: bool
    ) -> None:
        self.pool = pool
        self._is_enabled = is_enabled and pool.num_blocks > 0
        self.is_late = is_late and self._is_enabled
        self._block_size = block_size
        self._under_way: list[SwapCopy] = []
        """Late copies, in the order in which they end."""

    @property
    def num_under_way(self) -> int:
        """Late copies that have not ended."""
        return len(self._under_way)

    @property
    def copies_out(self) -> list[SwapCopy]:
        """Late copies to host memory that have not ended."""
        return [copy for copy in self._under_way if copy.is_out]

    @property
    def num_held(self) -> int:
        """Host blocks that only late copies hold, because their sequences do not need them any
        more."""
        return sum(len(copy.held_host_block_ids) for copy in self._under_way)

    def num_coming(self, pool: BlockPool) -> int:
        """Return how many blocks will be available when all copies to host memory have ended."""
        return sum(sum(map(pool.is_unshared, copy.block_ids)) for copy in self.copies_out)

    def swap_out(self, step: PlannedStep, sequence: Sequence) -> int:
        """Plan copies of the computed blocks to host memory if they fit; return their number.

        Must be called before the sequence releases its blocks. A late copy holds those that it
        copies, until `end`. If they do not fit, the sequence is recomputed.
        """
        count = blocks_for(sequence.num_computed, self._block_size)
        if not (self._is_enabled and 0 < count <= self.pool.num_available):
            return 0
        sequence.host_block_ids = self.pool.allocate(count)
        sequence.num_swapped = sequence.num_computed
        self._plan(step, sequence, sequence.block_table[:count], sequence.host_block_ids, True)
        return count

    def is_copied_in(self, sequence: Sequence, num_cached: int) -> bool:
        """Return whether a sequence must wait for a late copy when it is seated on cached tokens.

        `num_cached` is the number of its tokens that the prefix cache holds.
        """
        return self.is_late and sequence.num_swapped > num_cached

    def swap_in(self, step: PlannedStep, sequence: Sequence) -> None:
        """Plan copies back of the blocks that the prefix cache no longer holds.

        `num_computed` is what the prefix cache holds. Host blocks that this frees are not reused
        before the next plan, so one step may make its copies in any order of blocks, all swap-outs
        before all swap-ins. A late copy holds them until `end`.
        """
        if not sequence.host_block_ids:
            return
        num_found = sequence.num_computed // self._block_size
        host_block_ids = sequence.host_block_ids[num_found:]
        if host_block_ids:
            block_ids = sequence.block_table[num_found : len(sequence.host_block_ids)]
            self._plan(step, sequence, block_ids, host_block_ids, False)
        if not (self.is_late and host_block_ids):
            self._finish_in(sequence, is_good=True)

    def forget(self, sequence: Sequence) -> None:
        """Free the sequence's host blocks, if it has any: now, or when no copy uses them."""
        held = sequence.host_block_ids
        for copy in reversed(self._under_way):
            if copy.sequence is sequence and not set(copy.host_block_ids).isdisjoint(held):
                copy.held_host_block_ids = held
                break
        else:
            self.pool.release(held)
        sequence.host_block_ids = []
        sequence.num_swapped = 0

    def end(self, copy: SwapCopy, *, is_good: bool) -> bool:
        """Release the host blocks that only this late copy holds; return whether it can be used.

        What a copy to host memory should have saved is computed again if it was not made.
        """
        self._under_way.remove(copy)
        self.pool.release(copy.held_host_block_ids)
        sequence = copy.sequence
        if not copy.is_out:
            is_good = is_good and sequence.num_swapped > 0
            self._finish_in(sequence, is_good=is_good)
        elif not is_good and sequence.host_block_ids is copy.host_block_ids:
            if sequence.status is SequenceStatus.SWAPPING_IN:
                sequence.num_swapped = 0  # what is copied back is nothing
            else:
                self.forget(sequence)
        return is_good

    def _finish_in(self, sequence: Sequence, *, is_good: bool) -> None:
        if is_good:
            sequence.num_computed = max(sequence.num_computed, sequence.num_swapped)
        self.forget(sequence)

    def _plan(
        self,
        step: PlannedStep,
        sequence: Sequence,
        block_ids: list[int],
        host_block_ids: list[int],
        is_out: bool,
    ) -> None:
        if self.is_late:
            copy = SwapCopy(sequence, block_ids, host_block_ids, is_out)
            self._under_way.append(copy)
            step.swap_copies.append(copy)
        else:
            copies = step.swap_outs if is_out else step.swap_ins
            copies.append(BlockCopy(block_ids, host_block_ids))
