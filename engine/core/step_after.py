"""Offers a runner the step after a planned one, and takes that step if the runner has begun it."""

from __future__ import annotations

import numpy as np

from engine.core.blocks.block_pool import BlockUse
from engine.core.holdings import Holdings
from engine.core.planner_contract import PLAIN_DECODE, StepLimits, StepPlan, StopRule
from engine.core.planning.going_on import rows_after
from engine.core.runner_contract import RunnerResult
from engine.core.speculation.speculation import Speculation
from engine.core.step.step_in_flight import PlannedStep

STEPS_WITHOUT_DRAFTS = 16
"""The most steps in a row for which a node finds no draft, before it offers the step after one.

What is found in the tokens of a step cannot be verified in the one that was begun behind it. So a
run of drafts begins one step late; and waiting for the host takes a device 5 to 10 % of each step.
The number is halved when the wait was in vain, as the next draft came behind it, and doubled when a
draft came in it. Where drafts are rare, 16 waits for each would cost more than most drafts gain.
"""
_LEAST_WAIT = 2
"""The least such number: with one, no draft could come in the wait."""


class StepAfter:
    """The step offered after the latest planned one; see `planning.going_on`."""

    def __init__(
        self,
        held: Holdings,
        limits: StepLimits,
        speculation: Speculation | None,
        *,
        has_priorities: bool,
    ) -> None:
        """Take the node's `speculation`, which looks for drafts in the tokens of each step."""
        self._held, self._limits, self._has_priorities = held, limits, has_priorities
        self._most_to_wait = 0 if speculation is None else STEPS_WITHOUT_DRAFTS
        self._wait = self._num_to_wait = self._most_to_wait
        """Steps without drafts until one is offered, and how many of them are left."""
        self._step: PlannedStep | None = None
        """The step after which something was offered."""
        self._entries: dict[int, int] = {}
        """The entries in the offered step, by sequence id."""
        self._is_begun = False

    def plan(self) -> StepPlan | None:
        """Return the plan of the step that was begun, if any of its sequences still runs."""
        step, self._step = self._step, None
        left: list[int] = []
        if step is not None and step.batch.has_gone_on:
            left = [one for one in self._held.running.by_id if one in self._entries]
        self._is_begun = bool(left)
        if not left:
            return None
        return StepPlan(
            chunks=dict.fromkeys(left, PLAIN_DECODE),
            num_decode_tokens=len(left),
            stopped_by=StopRule.BEGUN if self._held.waiting else StopRule.NOTHING_WAITS,
        )

    def on_results(self, step: PlannedStep, results: RunnerResult) -> None:
        """Take those out of the step that was begun which it has not computed."""
        for entry in results.left_behind:
            self._entries.pop(step.sequences[entry].sequence_id, None)

    def on_taken(self, step: PlannedStep, *, has_drafts: bool) -> None:
        """Match a planned step with the step that the runner has begun, and offer the one after.

        `has_drafts`: some were found that a plan may verify; one that was begun verifies none.
        """
        if self._is_begun:
            entries = [self._entries[one.sequence_id] for one in step.sequences]
            step.batch.continues = np.array(entries, np.int64)
        if has_drafts:
            self._learn_wait()
            self._num_to_wait = self._wait
        elif self._num_to_wait and step.sequences and step.batch.has_decodes:
            self._num_to_wait -= 1
        if not self._num_to_wait:
            self._offer(step)

    def _learn_wait(self) -> None:
        """Learn from when a draft was found whether it pays to wait for one."""
        if not self._num_to_wait:
            self._wait = max(self._wait // 2, min(_LEAST_WAIT, self._most_to_wait))
        elif self._num_to_wait < self._wait:  # else the step before had drafts too
            self._wait = min(2 * self._wait, self._most_to_wait)

    def _offer(self, step: PlannedStep) -> None:
        """Offer the step after `step` to the runner, if that delays no sequence."""
        held, size = self._held, self._limits.block_size
        num_seated = len(held.running) + len(held.receiving)
        rows = rows_after(
            step,
            held.seats,
            num_running=len(held.running),
            num_waiting=len(held.waiting),
            has_seat=num_seated < self._limits.max_num_seqs or self._has_priorities,
            num_available=held.pool.num_available,
            block_size=size,
        )
        if rows is None:
            return
        going = [step.sequences[entry] for entry in rows.entries.tolist()]
        for entry, num in rows.lacking:
            block_ids = held.pool.allocate(num, BlockUse.RUNNING)
            held.seats.add_blocks(going[entry].seat, block_ids)
        step.batch.going_on = rows.entries
        self._step = step
        self._entries = {one.sequence_id: entry for entry, one in enumerate(going)}
