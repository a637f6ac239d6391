"""The state tables: every open state can end in every way, and no ended state goes on."""

from __future__ import annotations

import pytest

from kv_transfer.core.handshake import (
    LANDING_TABLE,
    LINK_TABLE,
    OPEN_LANDING_STATES,
    TRANSFER_TABLE,
    LandingState,
    LandingStep,
    LinkState,
    LinkStep,
    TransferState,
    TransferStep,
    advance,
)

OPEN_TRANSFER_STATES = [state for state in TransferState if state is not TransferState.ENDED]


@pytest.mark.parametrize("state", OPEN_TRANSFER_STATES)
def test_an_open_transfer_can_be_aborted_and_ended(state: TransferState) -> None:
    assert advance(TRANSFER_TABLE, state, TransferStep.ABORT) is TransferState.ABORTING
    for step in (TransferStep.FAILED, TransferStep.EXPIRED, TransferStep.PEER_LOST):
        assert advance(TRANSFER_TABLE, state, step) is TransferState.ENDED


@pytest.mark.parametrize("state", OPEN_LANDING_STATES)
def test_an_open_landing_can_be_ended(state: LandingState) -> None:
    assert advance(LANDING_TABLE, state, LandingStep.FAIL) is LandingState.FAILED
    assert advance(LANDING_TABLE, state, LandingStep.EXPIRE) is LandingState.EXPIRED
    assert advance(LANDING_TABLE, state, LandingStep.REVOKE) is LandingState.REVOKED


def test_only_a_promised_landing_completes() -> None:
    completing = [state for state, step in LANDING_TABLE if step is LandingStep.COMPLETE]
    assert completing == [LandingState.COMMITTING]


def test_only_a_promised_or_aborting_transfer_can_be_committed() -> None:
    committed = {state for state, step in TRANSFER_TABLE if step is TransferStep.COMMITTED}
    assert committed == {TransferState.COMMITTING, TransferState.ABORTING}


def test_an_end_is_an_end() -> None:
    assert all(state is not TransferState.ENDED for state, _ in TRANSFER_TABLE)
    assert all(state in OPEN_LANDING_STATES for state, _ in LANDING_TABLE)


def test_a_link_is_opened_again_only_after_it_broke() -> None:
    assert [s for s, step in LINK_TABLE if step is LinkStep.RETRY] == [LinkState.WAITING]
    assert [s for s, step in LINK_TABLE if step is LinkStep.WELCOMED] == [LinkState.CONNECTING]
