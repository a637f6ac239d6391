"""One table for both sides: every open state can end in every way, no ended state goes on."""

from __future__ import annotations

import pytest

from kv_transfer.shared.handshake import (
    HANDOFF_TABLE,
    LINK_TABLE,
    OPEN_STATES,
    HandoffState,
    HandoffStep,
    LinkState,
    LinkStep,
    advance,
)

S, E = HandoffState, HandoffStep
ENDED = {S.COMMITTED, S.ABORTED, S.FAILED, S.EXPIRED}


def sources(step: HandoffStep) -> set[HandoffState]:
    """The states from which `step` is allowed."""
    return {state for state, one in HANDOFF_TABLE if one is step}


@pytest.mark.covers("F62")
@pytest.mark.parametrize("state", OPEN_STATES)
def test_an_open_handoff_can_be_ended_in_every_way(state: HandoffState) -> None:
    assert advance(HANDOFF_TABLE, state, E.FAIL) is S.FAILED
    assert advance(HANDOFF_TABLE, state, E.EXPIRE) is S.EXPIRED
    assert advance(HANDOFF_TABLE, state, E.REVOKE) is S.ABORTED


def test_every_state_is_open_ended_or_quarantined() -> None:
    assert {*OPEN_STATES, *ENDED, S.QUARANTINED} == set(HandoffState)
    assert not ENDED & {*OPEN_STATES, S.QUARANTINED}


def test_an_end_is_an_end() -> None:
    assert not [(state, step) for state, step in HANDOFF_TABLE if state in ENDED]


def test_a_sender_aborts_by_asking() -> None:
    """Only the receiver knows whether the commit came first."""
    asking = (S.TRANSFERRING, S.COMMITTING, S.ABORTING)
    assert [advance(HANDOFF_TABLE, state, E.ABORT) for state in asking] == [S.ABORTING] * 3
    assert advance(HANDOFF_TABLE, S.ABORTING, E.CONFIRM) is S.ABORTED
    assert sources(E.CONFIRM) == {S.ABORTING}


@pytest.mark.covers("F26")
def test_only_what_was_promised_completes() -> None:
    assert sources(E.COMPLETE) == {S.COMMITTING, S.ABORTING}


def test_a_commit_needs_a_begin() -> None:
    assert sources(E.COMMIT) == {S.TRANSFERRING, S.COMMITTING}
    assert advance(HANDOFF_TABLE, S.RESERVED, E.BEGIN) is S.TRANSFERRING
    # A sender that reconnects begins again, and what it had promised still holds.
    assert advance(HANDOFF_TABLE, S.COMMITTING, E.BEGIN) is S.COMMITTING


def test_quarantine_is_left_by_release_alone() -> None:
    """Not by a deadline: `EXPIRE` is not allowed there."""
    assert {step for state, step in HANDOFF_TABLE if state is S.QUARANTINED} == {E.RELEASE}
    assert sources(E.RELEASE) == {S.QUARANTINED}
    # What nobody began cannot have been written.
    assert sources(E.QUARANTINE) == {S.TRANSFERRING, S.COMMITTING}


def test_a_link_is_opened_again_only_after_it_broke() -> None:
    assert [s for s, step in LINK_TABLE if step is LinkStep.RETRY] == [LinkState.WAITING]
    assert [s for s, step in LINK_TABLE if step is LinkStep.WELCOMED] == [LinkState.CONNECTING]
