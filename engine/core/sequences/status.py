"""The life of a sequence on one node, as one table.

    WAITING ──────────► RUNNING_PREFILL ──► RUNNING_DECODE ──► FINISHED
       │                      ▲   │             │ ▲ ▲
       │                      │   └► EXPORTING  ▼ │ │
       │                      └───────────── PREEMPTED (back to decoding from host memory)
       └► WAITING_FOR_KV ──────────────────────────►┘ (to RUNNING_DECODE)

A preempted sequence whose KV is copied back beside the steps is SWAPPING_IN before it decodes; when
that copy fails it is PREEMPTED again.

Every status may also go to FINISHED: abort, deadline and failure are legal everywhere.
"""

from __future__ import annotations

from enum import Enum


class SequenceStatus(Enum):
    """The status of a sequence. It is stored, never derived from token counts."""

    WAITING = "waiting"
    """No seat and no blocks yet."""
    WAITING_FOR_KV = "waiting_for_kv"
    """Holds a seat and blocks; another node writes the prompt's KV."""
    RUNNING_PREFILL = "running_prefill"
    """Some known tokens are not computed yet."""
    RUNNING_DECODE = "running_decode"
    """Computed up to the last known token; each step appends tokens."""
    PREEMPTED = "preempted"
    """Lost its blocks; waits in the queue to be recomputed, or copied back from host memory."""
    SWAPPING_IN = "swapping_in"
    """Holds a seat and blocks; its KV is being copied there from host memory."""
    EXPORTING = "exporting"
    """Holds blocks that a transfer may still read; has no seat and is never scheduled."""
    FINISHED = "finished"
    """Holds nothing; its quarantined blocks have no owner."""

    # Statuses are looked up for every sequence that moves; `Enum` hashes a name in Python.
    __hash__ = object.__hash__


_S = SequenceStatus
TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING_PREFILL, _S.WAITING_FOR_KV, _S.FINISHED}),
    _S.WAITING_FOR_KV: frozenset({_S.RUNNING_DECODE, _S.FINISHED}),
    _S.RUNNING_PREFILL: frozenset({_S.RUNNING_DECODE, _S.EXPORTING, _S.FINISHED}),
    _S.RUNNING_DECODE: frozenset({_S.PREEMPTED, _S.EXPORTING, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.RUNNING_PREFILL, _S.RUNNING_DECODE, _S.SWAPPING_IN, _S.FINISHED}),
    _S.SWAPPING_IN: frozenset({_S.RUNNING_DECODE, _S.PREEMPTED, _S.FINISHED}),
    _S.EXPORTING: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}


def check_transition(old: SequenceStatus, new: SequenceStatus) -> None:
    """Raise `ValueError` when the table does not allow `old` → `new`."""
    if new not in TRANSITIONS[old]:
        raise ValueError(f"a sequence cannot go from {old.value} to {new.value}")
