"""KV of preempted sequences in host memory: out when they lose their blocks, back when seated."""

from __future__ import annotations

from common.blocks import blocks_for
from engine.core.host_pool import HostPool
from engine.core.planned_step import BlockCopy, PlannedStep
from engine.core.sequence import Sequence


class Swapping:
    """Which blocks a step copies between the cache and `pool`."""

    def __init__(self, pool: HostPool, block_size: int) -> None:
        self.pool = pool
        self._block_size = block_size

    def swap_out(self, step: PlannedStep, sequence: Sequence) -> int:
        """Keep what is computed, if there is room for it; the number of blocks copied.

        Called before the sequence lets go of its blocks. Without room it will be recomputed.
        """
        count = blocks_for(sequence.num_computed, self._block_size)
        if not 0 < count <= self.pool.num_free:
            return 0
        sequence.host_block_ids = self.pool.allocate(count)
        sequence.num_swapped = sequence.num_computed
        step.swap_outs.append(BlockCopy(sequence.block_table[:count], sequence.host_block_ids))
        return count

    def swap_in(self, step: PlannedStep, sequence: Sequence) -> None:
        """Bring back what the prefix cache, which `num_computed` tells, does not hold any more.

        Places that this frees are not used again before the next plan, so the copies of one step
        may be made in any order of blocks, outs before ins.
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
        """Give its places in host memory back, if it has any."""
        self.pool.release(sequence.host_block_ids)
        sequence.host_block_ids = []
        sequence.num_swapped = 0
