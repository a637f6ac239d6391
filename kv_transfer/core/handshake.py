"""The states of a handoff on both sides, as tables.

Sender, one per `open`:

    TRANSFERRING ──commit──► COMMITTING ──committed──► ENDED
         │  └──────abort───► ABORTING ◄──abort──┘        ▲
         │                      │ aborted, committed     │
         └── failed, expired, peer lost (from any) ──────┘

Receiver, one per `expect`:

    RESERVED ──begin──► RECEIVING ──commit──► COMMITTING ──complete──► COMMITTED
        └──────────────────┴──────────────────────┤
                  failed ──► FAILED    expired ──► EXPIRED    revoked ──► REVOKED

The connection that carries the sender's frames:

    CONNECTING ──welcomed──► READY ──broken──► WAITING ──retry──► CONNECTING
         └────────broken────────────────────────►┘

A pair that is in no table is not allowed: `advance` answers None, and the caller knows whose fault
it is, its own caller's or the peer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar


class TransferState(Enum):
    TRANSFERRING = auto()
    COMMITTING = auto()
    ABORTING = auto()
    ENDED = auto()


class TransferStep(Enum):
    COMMIT = auto()
    ABORT = auto()
    COMMITTED = auto()
    ABORTED = auto()
    FAILED = auto()
    EXPIRED = auto()
    PEER_LOST = auto()


class LandingState(Enum):
    RESERVED = auto()
    RECEIVING = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    FAILED = auto()
    EXPIRED = auto()
    REVOKED = auto()


class LandingStep(Enum):
    BEGIN = auto()
    COMMIT = auto()
    COMPLETE = auto()
    FAIL = auto()
    EXPIRE = auto()
    REVOKE = auto()


class LinkState(Enum):
    CONNECTING = auto()
    READY = auto()
    WAITING = auto()


class LinkStep(Enum):
    WELCOMED = auto()
    BROKEN = auto()
    RETRY = auto()


_S, _E = TransferState, TransferStep
TRANSFER_TABLE: Mapping[tuple[TransferState, TransferStep], TransferState] = {
    (_S.TRANSFERRING, _E.COMMIT): _S.COMMITTING,
    (_S.TRANSFERRING, _E.ABORT): _S.ABORTING,
    (_S.COMMITTING, _E.ABORT): _S.ABORTING,
    (_S.ABORTING, _E.ABORT): _S.ABORTING,
    (_S.COMMITTING, _E.COMMITTED): _S.ENDED,
    (_S.ABORTING, _E.COMMITTED): _S.ENDED,
    (_S.ABORTING, _E.ABORTED): _S.ENDED,
    **{
        (state, step): _S.ENDED
        for state in (_S.TRANSFERRING, _S.COMMITTING, _S.ABORTING)
        for step in (_E.FAILED, _E.EXPIRED, _E.PEER_LOST)
    },
}

_R, _L = LandingState, LandingStep
OPEN_LANDING_STATES = (_R.RESERVED, _R.RECEIVING, _R.COMMITTING)
LANDING_TABLE: Mapping[tuple[LandingState, LandingStep], LandingState] = {
    (_R.RESERVED, _L.BEGIN): _R.RECEIVING,
    # A sender that reconnected begins again; what it had promised still holds.
    (_R.RECEIVING, _L.BEGIN): _R.RECEIVING,
    (_R.COMMITTING, _L.BEGIN): _R.COMMITTING,
    (_R.RECEIVING, _L.COMMIT): _R.COMMITTING,
    (_R.COMMITTING, _L.COMMIT): _R.COMMITTING,
    (_R.COMMITTING, _L.COMPLETE): _R.COMMITTED,
    **{(state, _L.FAIL): _R.FAILED for state in OPEN_LANDING_STATES},
    **{(state, _L.EXPIRE): _R.EXPIRED for state in OPEN_LANDING_STATES},
    **{(state, _L.REVOKE): _R.REVOKED for state in OPEN_LANDING_STATES},
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
    """The state after `step`, or None where the table does not allow it."""
    return table.get((state, step))
