"""When the faults and the changes of a history begin and end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.control.drain import LAST_GRACE_S
from simulator.faults.history import Fault, History
from simulator.faults.kinds import BREAKING, DRAINS, FaultKind


@dataclass(frozen=True, slots=True)
class FaultTimes:
    """The first time in seconds at which something is broken, steps fail or a node is to leave,
    infinite without, and the time at which the last fault or change is over; 0 without."""

    first_broken_s: float
    first_failing_s: float
    first_drain_s: float
    end_s: float


def fault_times(history: History) -> FaultTimes:
    """Return these times of a history."""
    faults, drain_s = history.faults, history.shape.drain_s
    return FaultTimes(
        _first_s(faults, BREAKING),
        _first_s(faults, (FaultKind.STEP,)),
        _first_s(faults, DRAINS),
        max((_end_s(fault, drain_s) for fault in faults), default=0.0),
    )


def _first_s(faults: Sequence[Fault], kinds: Sequence[FaultKind]) -> float:
    return min((one.at_s for one in faults if one.kind in kinds), default=float("inf"))


def _end_s(fault: Fault, drain_s: float) -> float:
    """Return when a fault or a change is over, whatever becomes of it."""
    if fault.kind in DRAINS:
        return fault.at_s + drain_s + LAST_GRACE_S + fault.span_s
    return fault.at_s + fault.span_s
