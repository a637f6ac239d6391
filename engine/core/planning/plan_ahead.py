"""A plan made while the step before it runs, and whether it can still be taken when that has ended.

Nothing is taken before. So a plan that cannot be taken is forgotten, and there is nothing to undo.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Set
from itertools import islice

from engine.core.planner_contract import AheadRule, PlanPolicy, StepPlan, StopRule
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_in_flight import PlannedStep


class PlanAhead:
    """The plan after `step`, as long as nothing prevents that it is taken."""

    def __init__(
        self, step: PlannedStep, plan: StepPlan, waiting: Iterable[Sequence], policy: PlanPolicy
    ) -> None:
        """Keep the plan if it takes nothing but seats and blocks that are free.

        It was made with `waiting` as the queue.
        """
        self._step = step
        self._plan = plan
        self._has_results = False
        self._has_new_work = False
        self.rule = AheadRule.TAKEN
        """What prevents that the plan is taken, if anything does; `take` completes it."""
        self._admitted: dict[int, Sequence] = {}
        """The waiting sequences that the plan admits, by id."""
        if plan.preempted or plan.stopped_by in (StopRule.NO_VICTIM, StopRule.COPYING):
            self.rule = AheadRule.BLOCKS
        elif plan.admissions:
            admitted = {one.sequence_id for one in plan.admissions}
            looked_at = islice(waiting, len(admitted) + policy.config.skip_ahead_window)
            self._admitted = {s.sequence_id: s for s in looked_at if s.sequence_id in admitted}
        # The plan would not look at a sequence with so many others before it.
        self._reach = len(plan.admissions) + policy.config.skip_ahead_window + 1
        if policy.config.enable_priority_scheduling:
            self._reach = sys.maxsize
        elif plan.stopped_by in (StopRule.NO_SEAT, StopRule.NO_BUDGET, StopRule.BARRIER):
            self._reach = 0

    def on_results(self, step: PlannedStep) -> None:
        """Note that the results of `step` are recorded, which may be a part of the step."""
        self._has_results = step is self._step

    def on_arrival(self, position: int, *, is_last: bool) -> None:
        """Note that a sequence waits behind `position` others, and that it is the last or not.

        One that waits before others may have to be admitted before them.
        """
        self._has_new_work |= position < self._reach or not is_last

    def on_landing(self) -> None:
        """Note that a sequence runs which did not when the plan was made."""
        self._has_new_work = True

    def on_taken_blocks(self) -> None:
        """Note that blocks were taken which the plan may count on."""
        self._has_new_work = True

    def on_failed_copy(self) -> None:
        """Note that KV which the plan counts on may not have been copied."""
        self._has_new_work = True

    def take(
        self,
        running: Set[int],
        waiting: Container[Sequence],
        prefixes: PrefixIndex,
        *,
        has_drafts: bool,
    ) -> StepPlan | None:
        """Return the plan without the sequences that have ended; None if `rule` prevents it.

        `running` are the ids of all that run, `waiting` the queue as it is now. `has_drafts`: a
        running sequence has drafts to verify, which no plan made ahead contains.
        """
        if self.rule is not AheadRule.TAKEN:
            return None
        gone = self._plan.chunks.keys() - running
        gone |= {s.sequence_id for s in self._admitted.values() if s not in waiting}
        plan = self._plan.without(gone) if gone else self._plan
        if not self._has_results:
            self.rule = AheadRule.FAILED
        elif has_drafts:
            self.rule = AheadRule.DRAFTS
        elif self._has_new_work:
            self.rule = AheadRule.NEW_WORK
        elif not plan.chunks and not plan.admissions:
            self.rule = AheadRule.NOTHING_LEFT
        elif any(
            tuple(prefixes.match(self._admitted[one.sequence_id])) != one.cached_block_ids
            for one in plan.admissions
        ):
            self.rule = AheadRule.PREFIX
        return plan if self.rule is AheadRule.TAKEN else None
