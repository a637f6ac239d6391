"""A plain step that is run several times without a plan for each time, and what is due meanwhile.

Where nobody waits, a step of decodes is followed by the same one, until an answer ends. Two things
change before that, each at its moment: a block that is full becomes findable, and its sequence
needs the next one, which may evict what others look for. Who runs such steps without planning them
(`RunnerResult.num_steps`) has both done here.
"""

from __future__ import annotations

from engine.core.blocks.block_pool import BlockUse
from engine.core.holdings import Holdings
from engine.core.planner_contract import StepLimits
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.seats import Ints
from engine.core.statistics import StepCounters
from engine.core.step.step_batch import StepBatch


class StepAgain:
    """Goes on with the step that was planned last, as the planner would."""

    def __init__(
        self, held: Holdings, limits: StepLimits, prefixes: PrefixIndex, counters: StepCounters
    ) -> None:
        self._held = held
        self._block_size = limits.block_size
        self._prefixes = prefixes
        self._counters = counters

    def go_on(self, batch: StepBatch, token_ids: Ints, took_s: float) -> bool:
        """Do what `Scheduler.go_on` says, but for the reservation."""
        held, rows = self._held, batch.rows
        num_sequences, num_steps = token_ids.shape
        if held.waiting or num_sequences < len(held.running):
            return False
        num_known = held.seats.num_known.take(rows)
        lacking = held.seats.lacking(rows, num_known + num_steps, self._block_size)
        if sum(num for _, num in lacking) > held.pool.num_available:
            return False
        held.seats.append_several_each(rows, num_known, token_ids)
        # All that run decode, so the batch has them in their order.
        is_full = (num_known + num_steps - 1) % self._block_size < num_steps
        for entry in is_full.nonzero()[0].tolist():
            self._prefixes.publish(held.running[entry])
        for entry, num in lacking:
            block_ids = held.pool.allocate(num, BlockUse.RUNNING)
            held.seats.add_blocks(rows.item(entry), block_ids)
        self._counters.on_ran(took_s, has_prompts=False)
        self._counters.on_repeated(num_sequences, num_steps)
        return True
