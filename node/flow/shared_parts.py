"""The parts of a flow that prompts and reservations share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import PdserveError
from engine.core.scheduler import Scheduler
from node.flow.attempts.attempt_queue import AttemptQueue
from node.flow.attempts.attempt_table import AttemptTable, NodeAttempt
from node.flow.copies_under_way import CopiesUnderWay
from node.flow.flow_limits import FlowLimits
from node.flow.messages import Effect
from node.flow.pulls.prefix_pulls import PrefixPulls


@dataclass(frozen=True, slots=True)
class SharedParts:
    """`fail` ends an attempt with a typed error."""

    scheduler: Scheduler
    attempts: AttemptTable
    queue: AttemptQueue
    copies: CopiesUnderWay
    pulls: PrefixPulls
    limits: FlowLimits
    fail: Callable[[NodeAttempt, PdserveError], list[Effect]]
