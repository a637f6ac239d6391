"""Which nodes a request may still ask, and whether it waits where there is none. No I/O, no clock.

A node that refused or failed an attempt is not asked again before it is forgiven: by the next token
of the answer (every node), when it is heard again after a loss (that node), or when the request has
waited for a node, or beside a suspected one that holds it up (every node). A node whose pool is too
small for the answer is never forgiven.

Failures count until the next token. A request that loses `MAX_DEATHS` nodes without a token in
between may be what ends them: no other node is asked until one of these is heard again, or has
started again. Then it was perhaps only its connection that was lost, as after a time in which this
router stood still, and at worst the request ends what somebody starts again: `MAX_FAILURES` bounds
how often. Nodes that ended their streams in order do not count.
"""

from __future__ import annotations

import math

from common.errors import (
    DeadlineUnreachable,
    Draining,
    HandoffFailed,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PdserveError,
    PoolExhausted,
    StaleEpoch,
)
from common.ids import Incarnation
from router.core.policies.query import NoneStays

MAX_DEATHS = 3
MAX_FAILURES = 6
"""Attempts without a token. Those that a draining node handed over do not count."""
WAIT_S = 1.0
"""How long a request waits before it asks again, unless a node can be chosen sooner."""
WAITS_OF_NEW = 2
WAITS_AFTER_DEATHS = 10
WAITS_FOR_LONGER = 60
"""How often a request whose node was lost waits where all others are too short for it: a minute, in
which most nodes that restart are back."""


class NodeAway(NodeLost):
    """A node was not asked, or has ended its stream in order: the request has not ended it."""


class Candidates:
    """The nodes that one request has asked, and with what result."""

    def __init__(self) -> None:
        self.failure: PdserveError | None = None
        """What ended the attempt before the current one, if there was one."""
        self.may_queue = False
        """Whether a full node is asked to queue the request, because every node is full."""
        self._refused: set[Incarnation] = set()
        self._failed: set[Incarnation] = set()
        self._full: set[Incarnation] = set()
        self._unfit: set[Incarnation] = set()
        self._dead: set[Incarnation] = set()
        self._moved: set[Incarnation] = set()
        """Nodes that have begun to decode since the request came."""
        self._num_failures = 0
        self._num_emitted = 0
        self._num_waits = 0
        self._is_too_long = False
        self._has_none_staying = False
        """Whether the last choice found no node that stays."""
        self._retry_after_s: dict[Incarnation, float] = {}
        """The nodes that had no room and are not known to leave, and when to come again."""
        self._is_shed = False
        self._last_refusal = ""

    @property
    def excluded(self) -> frozenset[Incarnation]:
        """The nodes that are not asked now."""
        return frozenset(self._refused | self._failed | self._unfit)

    @property
    def has_failed_too_often(self) -> bool:
        return self._num_failures >= MAX_FAILURES

    @property
    def may_try_beside(self) -> bool:
        """Whether a further attempt beside the main one may fail, and the main one after it."""
        return self._num_failures < MAX_FAILURES // 2

    @property
    def has_lost_too_many(self) -> bool:
        """Whether no other node may be asked before a lost one is heard again."""
        return len(self._dead) >= MAX_DEATHS

    # Events.

    def on_refusal(
        self, node: Incarnation, error: PdserveError, *, can_queue: bool, is_prompt: bool = False
    ) -> None:
        """Exclude the node that refused; `can_queue`: it is full, and was not asked to queue it.

        A prompt is refused in the role that the node had when it was asked (`is_prompt`): one that
        has begun to decode since may be asked once more.
        """
        # A queue does not help a request for which a queue is too long.
        is_shed = isinstance(error, DeadlineUnreachable)
        self._is_shed |= is_shed
        if is_prompt and node in self._moved:
            self._moved.remove(node)
        else:
            self._refused.add(node)
        self._last_refusal = f"{node} said last: {error}"
        if isinstance(error, Draining):
            self._retry_after_s.pop(node, None)
        elif isinstance(error, Overloaded):
            known_s = self._retry_after_s.get(node, math.inf)
            self._retry_after_s[node] = min(error.retry_after_s, known_s)
            if can_queue and not is_shed:
                self._full.add(node)

    def on_failure(self, node: Incarnation, error: PdserveError, num_emitted: int) -> None:
        """Exclude the node that failed an attempt after `num_emitted` tokens of the answer.

        One that has no room after all has refused it, only later than others.
        """
        if num_emitted > self._num_emitted:
            self._num_emitted = num_emitted
            self.forgive()
            self._dead.clear()
            self._num_failures = 0
        if isinstance(error, Overloaded):
            self.on_refusal(node, error, can_queue=False)
            return
        self.failure = error
        self._num_waits = 0
        self._failed.add(node)
        if isinstance(error, PoolExhausted):
            self._unfit.add(node)
        if not isinstance(error, Draining):
            self._num_failures += 1
            if isinstance(error, NodeLost) and not isinstance(error, NodeAway):
                self._dead.add(node)

    def on_heard(self, node: Incarnation) -> None:
        """Forgive a node that failed and can be chosen again, in this life or another one."""
        self._dead = {dead for dead in self._dead if dead.node_id != node.node_id}
        self._failed.discard(node)

    def on_moved(self, node: Incarnation) -> None:
        """Forgive a node that has another role now."""
        self._refused.discard(node)
        self._moved.add(node)

    def on_waited(self) -> None:
        """Forgive all nodes: the request has waited for one."""
        self._num_waits += 1
        self.forgive()

    def forgive(self) -> bool:
        """Let every node be asked again, but those whose pool is too small; return whether there is
        one."""
        has_any = bool(self._refused or self._failed)
        self._refused.clear()
        self._failed.clear()
        self._full.clear()
        self.may_queue = False
        return has_any

    def on_none(self, error: PdserveError) -> None:
        """Record why no node could be chosen. Its waits for a longer node begin when it is too long
        for those that are there."""
        was_too_long, self._is_too_long = self._is_too_long, isinstance(error, InvalidRequest)
        if self._is_too_long and not was_too_long:
            self._num_waits = 0
        self._has_none_staying = isinstance(error, NoneStays)
        if self._has_none_staying:
            self._retry_after_s.clear()  # those that had no room leave too, or are gone

    # Questions, when no node is left.

    def asks_to_queue(self) -> bool:
        """Forgive the full nodes that were not asked to queue the request: now one of them may.
        False: there is none."""
        if not self._full:
            return False
        self.may_queue = True
        self._refused -= self._full
        self._full.clear()
        return True

    def can_wait(self, num_emitted: int) -> bool:
        """Return whether the request waits for a node.

        A continued answer, and a request whose node was lost, do so until their deadline, and for
        `WAITS_FOR_LONGER` waits where all nodes are too short. So does one whose handoff failed
        where no node stays: its decode node may have left, and is heard after its peer. A new
        request waits for `WAITS_OF_NEW` waits, and not at all where nodes that stay have no room
        for it.
        """
        if self.has_lost_too_many:
            return self._num_waits < WAITS_AFTER_DEATHS
        is_lost = isinstance(self.failure, NodeLost)
        if self._has_none_staying:
            is_lost |= isinstance(self.failure, (HandoffFailed, StaleEpoch))
        if num_emitted or is_lost:
            return not self._is_too_long or self._num_waits < WAITS_FOR_LONGER
        is_new = self.failure is None and not self._retry_after_s
        return is_new and self._num_waits < WAITS_OF_NEW

    def why_none(self, error: PdserveError) -> PdserveError:
        """Return the client's error; `error` is why no node could be chosen."""
        if not isinstance(error, Overloaded):  # it is too long
            if self.failure is None and self._last_refusal:  # a node that had no room holds it
                return self.overloaded(str(error), WAIT_S)
            if self.failure is None:
                return error
            return NodeLost(f"{self.failure}, and no node that is left holds it: {error}")
        if isinstance(self.failure, Draining):
            return NodeLost(f"{self.failure}, and no other node can go on")
        return self.failure or self.overloaded(str(error), error.retry_after_s)

    def overloaded(self, message: str, retry_after_s: float) -> Overloaded:
        """Return the error of a request that no node took, with what the last one said."""
        retry_after_s = min(self._retry_after_s.values(), default=retry_after_s)
        if self._last_refusal:
            message = f"{message}; {self._last_refusal}"
        kind = DeadlineUnreachable if self._is_shed else Overloaded
        return kind(message, retry_after_s=retry_after_s)
