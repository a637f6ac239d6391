"""KV of preempted sequences in host memory: copied out at preemption, copied back at admission."""

from __future__ import annotations

from common.blocks import blocks_for
from engine.core.host_pool import HostPool
from engine.core.planned_step import BlockCopy, PlannedStep
from engine.core.sequence import Sequence


class Swapping:
    """The block copies of a step between the cache and the host `pool`."""

    def __init__(self, pool: HostPool, block_size: int) -> None:
        self.pool = pool
        self._block_size = block_size

    def swap_out(self, step: PlannedStep, sequence: Sequence) -> int:
        """Plan copies of the computed blocks to host memory if they fit; return their number.

        Must be called before the sequence releases its blocks. If they do not fit, the sequence is
        recomputed.
        """
        count = blocks_for(sequence.num_computed, self._block_size)
        if not 0 < count <= self.pool.num_free:
            return 0
        sequence.host_block_ids = self.pool.allocate(count)
        sequence.num_swapped = sequence.num_computed
        step.swap_outs.append(BlockCopy(sequence.block_table[:count], sequence.host_block_ids))
        return count

    def swap_in(self, step: PlannedStep, sequence: Sequence) -> None:
        """Plan copies back of the blocks that the prefix cache no longer holds.

        `num_computed` is what the prefix cache holds. Host blocks that this frees are not reused
        before the next plan, so one step may make its copies in any order of blocks, all swap-outs
        before all swap-ins.
        """
        if not sequence.host_block_ids:
            return
        num_found = sequence.num_computed // self._block_size
        host_block_ids = sequence.host_block_ids[num_found:]
        if host_block_ids:
            block_ids = sequence.block_table[num_found : len(sequence.host_block_ids)]
            step.swap_ins.append(BlockCopy(block_ids, host_block_ids))
        sequence.num_computed = max(sequence.num_computed, sequence.num_swapped)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free the sequence's host blocks, if it has any."""
        self.pool.release(sequence.host_block_ids)
        sequence.host_block_ids = []
        sequence.num_swapped = 0
