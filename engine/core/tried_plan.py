"""The plan that showed that a request can be seated, for as long as it is the one to be made."""

from __future__ import annotations

from engine.core.holdings import Holdings
from engine.core.planner_contract import StepPlan
from engine.core.sequences.sequence import Sequence


class TriedPlan:
    """A plan that was decided with a further sequence in the queue.

    It is made for a reservation that may not wait, which is queued next, and most often nothing
    else happens before the plan of the step.
    """

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._plan: StepPlan | None = None
        self._sequence: Sequence | None = None
        self._is_queued = False
        self._mark: list[int] = []

    def keep(self, sequence: Sequence, plan: StepPlan) -> None:
        """Keep a plan that seats `sequence`, which is in the queue."""
        self._sequence, self._plan, self._is_queued = sequence, plan, False
        self._mark = self._marked()

    def on_queued(self, sequence: Sequence) -> None:
        """Note the one sequence in the queue; there may be no other."""
        self._is_queued = sequence is self._sequence

    def take(self) -> StepPlan | None:
        """Return the plan if it would be made again, and forget it."""
        plan = self._plan
        if plan is None:
            return None
        is_same = self._is_queued and self._mark == self._marked()
        self.forget()
        return plan if is_same else None

    def forget(self) -> None:
        """Keep no plan."""
        self._plan = self._sequence = None
        self._is_queued = False

    # Without a plan and without results, sequences only leave, or come from those that receive. Of
    # blocks, those that are taken are counted, and those that are given back can be had.
    def _marked(self) -> list[int]:
        held, pool = self._held, self._held.pool
        groups = held.waiting, held.running, held.receiving, held.exporting, held.quarantined
        return [*map(len, groups), pool.num_available, pool.num_taken]
