"""When a node may refuse a request, and how many requests may wait there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from common.errors import DeadlineUnreachable, InternalError, Overloaded, PdserveError
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from node.flow.attempts.attempt_table import NodeAttempt
from simulator.faults.demand.grammars import NO_ROOM
from simulator.faults.shape import MOST_QUEUED, Shape

MOST_RETRY_S = 60.0


def check_refusal(shape: Shape, error: PdserveError, *, is_empty: bool, num_waiting: int) -> None:
    """Check that a node refuses for want of room or time only while it has something to do.

    Raises `InternalError`.
    """
    if not isinstance(error, Overloaded):
        return
    if not 0 < error.retry_after_s <= MOST_RETRY_S:
        raise InternalError(f"a node says to come again in {error.retry_after_s} s")
    if isinstance(error, DeadlineUnreachable):
        if not shape.sheds or not num_waiting:
            raise InternalError(f"a node sheds a request, and {num_waiting} wait there: {error}")
    elif is_empty and str(error) != NO_ROOM:
        raise InternalError(f"a node refuses a request, and has nothing to do: {error}")


def check_waiting(shape: Shape, attempts: Iterable[NodeAttempt]) -> None:
    """Check that no more requests wait to begin than a node queues, and none was passed too often.

    Raises `InternalError`.
    """
    waiting = [one.sequence for one in attempts if one.sequence.status is SequenceStatus.WAITING]
    for sequence in waiting:
        if sequence.num_bypassed > shape.skip_ahead_limit:
            says = f"was passed by {sequence.num_bypassed}, and {shape.skip_ahead_limit} may"
            raise InternalError(f"{sequence.request.id} {says}")
    num = len(waiting)
    if num > shape.max_queued:
        raise InternalError(f"{num} requests wait on a node that queues {shape.max_queued}")


class Passes:
    """How often each waiting sequence of a node was passed by one behind it, counted here too."""

    def __init__(self) -> None:
        self._num: dict[int, int] = {}
        """How often each that waits was passed, by its id."""
        self._seated: frozenset[int] = frozenset()

    def take(self, waiting: Iterable[Sequence], seated: Collection[Sequence]) -> None:
        """Take who waits and who is seated after a turn, in an order that no priority changes.

        A preempted one is not passed. Raises `InternalError` where the node has counted otherwise.
        """
        admitted = [one.queue_key for one in seated if one.sequence_id not in self._seated]
        self._seated = frozenset(one.sequence_id for one in seated)
        before, self._num = self._num, {}
        for one in waiting:
            num = before.get(one.sequence_id, 0) + sum(key > one.queue_key for key in admitted)
            if one.status is not SequenceStatus.WAITING:
                num = 0
            if num != one.num_bypassed:
                says = f"was passed by {num}, and the node counts {one.num_bypassed}"
                raise InternalError(f"{one.request.id} {says}")
            self._num[one.sequence_id] = num


def refusals_of(shape: Shape) -> frozenset[str]:
    """Return how a request may end because its nodes refuse it."""
    refusals = set()
    if shape.max_queued < MOST_QUEUED:
        refusals.add(Overloaded.code)
    if shape.sheds:
        refusals.add(DeadlineUnreachable.code)
    return frozenset(refusals)
