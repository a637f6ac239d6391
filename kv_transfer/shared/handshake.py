"""The states of a handoff, one table for both sides, and those of the connection under it.

    RESERVED ──begin──► TRANSFERRING ──commit──► COMMITTING ──complete──► COMMITTED
        │                    │ │ └─────abort────────┤ │                       ▲
        │                    │ │                    ▼ │          complete ────┤
        │                    │ │                ABORTING ─────────────────────┴─ confirm ─► ABORTED
        │                    │ └──quarantine──────────┴──► QUARANTINED ──────── release ──────▲
        └────────────────────┴── fail ► FAILED   expire ► EXPIRED   revoke ► ABORTED

A sender's side begins at `open`, and aborts by a request: only the receiver knows whether the
commit came first. One whose BEGIN was never sent has no commit, and is ABORTED at once. A
receiver's side is RESERVED until a sender begins. On a one-sided lane an ending that its sender did
not confirm quarantines the blocks until they are released.

The connection that carries the sender's frames:

    CONNECTING ──welcomed──► READY ──broken──► WAITING ──retry──► CONNECTING
         └────────broken────────────────────────►┘

A pair that is in no table is not allowed: `advance` returns None, and the caller decides whether
that is misuse by its own caller or by the peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar


class _Known(Enum):
    """A state or a step, many of which are looked up; `Enum` hashes a name in Python."""

    __hash__ = object.__hash__


class HandoffState(_Known):
    RESERVED = auto()
    TRANSFERRING = auto()
    COMMITTING = auto()
    ABORTING = auto()
    COMMITTED = auto()
    ABORTED = auto()
    FAILED = auto()
    EXPIRED = auto()
    QUARANTINED = auto()


class HandoffStep(_Known):
    BEGIN = auto()
    COMMIT = auto()
    COMPLETE = auto()
    ABORT = auto()
    CONFIRM = auto()
    REVOKE = auto()
    FAIL = auto()
    EXPIRE = auto()
    QUARANTINE = auto()
    RELEASE = auto()


class LinkState(_Known):
    CONNECTING = auto()
    READY = auto()
    WAITING = auto()


class LinkStep(_Known):
    WELCOMED = auto()
    BROKEN = auto()
    RETRY = auto()


_S, _E = HandoffState, HandoffStep
OPEN_STATES = (_S.RESERVED, _S.TRANSFERRING, _S.COMMITTING, _S.ABORTING)
HANDOFF_TABLE: Mapping[tuple[HandoffState, HandoffStep], HandoffState] = {
    (_S.RESERVED, _E.BEGIN): _S.TRANSFERRING,
    # A sender that reconnected begins again; an earlier commit still holds.
    (_S.TRANSFERRING, _E.BEGIN): _S.TRANSFERRING,
    (_S.COMMITTING, _E.BEGIN): _S.COMMITTING,
    (_S.TRANSFERRING, _E.COMMIT): _S.COMMITTING,
    (_S.COMMITTING, _E.COMMIT): _S.COMMITTING,
    (_S.COMMITTING, _E.COMPLETE): _S.COMMITTED,
    (_S.TRANSFERRING, _E.ABORT): _S.ABORTING,
    (_S.COMMITTING, _E.ABORT): _S.ABORTING,
    (_S.ABORTING, _E.ABORT): _S.ABORTING,
    (_S.ABORTING, _E.COMPLETE): _S.COMMITTED,
    (_S.ABORTING, _E.CONFIRM): _S.ABORTED,
    **{(state, _E.REVOKE): _S.ABORTED for state in OPEN_STATES},
    **{(state, _E.FAIL): _S.FAILED for state in OPEN_STATES},
    **{(state, _E.EXPIRE): _S.EXPIRED for state in OPEN_STATES},
    (_S.TRANSFERRING, _E.QUARANTINE): _S.QUARANTINED,
    (_S.COMMITTING, _E.QUARANTINE): _S.QUARANTINED,
    (_S.QUARANTINED, _E.RELEASE): _S.ABORTED,
}

LINK_TABLE: Mapping[tuple[LinkState, LinkStep], LinkState] = {
    (LinkState.CONNECTING, LinkStep.WELCOMED): LinkState.READY,
    (LinkState.CONNECTING, LinkStep.BROKEN): LinkState.WAITING,
    (LinkState.READY, LinkStep.BROKEN): LinkState.WAITING,
    (LinkState.WAITING, LinkStep.RETRY): LinkState.CONNECTING,
}

State = TypeVar("State")
Step = TypeVar("Step")


def advance(table: Mapping[tuple[State, Step], State], state: State, step: Step) -> State | None:
    """Return the state after `step`, or None if the table does not allow it."""
    return table.get((state, step))
