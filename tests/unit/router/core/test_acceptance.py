"""When a request counts as accepted: what its client learns before the first token."""

from __future__ import annotations

import pytest

from common.errors import Overloaded
from router.core.effects import Accepted, SendAbort
from router.core.request_flow import PrefillGrant
from tests.unit.router.core.flow_events import (
    D0,
    D1,
    FIRST,
    LOCAL,
    P0,
    P1,
    SECOND,
    TICKET,
    emitted,
    new_flow,
    output,
    prefilling,
    reserving,
)


@pytest.mark.covers("W06")
def test_a_request_is_accepted_by_the_node_that_computes_its_prompt() -> None:
    """A ticket alone is no acceptance, because every prefill node may refuse it."""
    flow = reserving()
    assert Accepted() not in flow.on_reserve_reply(D0, FIRST, TICKET, 11.0)
    assert flow.on_prefill_reply(P0, FIRST, PrefillGrant()) == [Accepted()]
    assert flow.on_prefill_reply(P0, FIRST, PrefillGrant()) == [], "it was said before"
    assert reserving(None).on_reserve_reply(D0, FIRST, LOCAL, 11.0)[-1] == Accepted()
    alone = new_flow(max_tokens=1)
    alone.on_choice(None, P0, "one token", 10.0)
    assert alone.on_prefill_reply(P0, FIRST, PrefillGrant()) == [Accepted()]


def test_a_refusal_and_a_late_grant_accept_nothing() -> None:
    full = Overloaded("full", retry_after_s=1.0)
    flow = prefilling()
    assert Accepted() not in flow.on_prefill_reply(P0, FIRST, full)
    assert flow.on_prefill_reply(P0, FIRST, PrefillGrant()) == [], "it is not asked any more"
    flow.on_choice(D0, P1, "why", 12.0)
    assert flow.on_prefill_reply(P1, FIRST, PrefillGrant()) == [Accepted()]
    gone = prefilling()
    gone.on_client_gone()
    assert gone.on_prefill_reply(P0, FIRST, PrefillGrant()) == [SendAbort(P0, FIRST)]


def test_later_attempts_and_what_overtakes_a_reply_accept_nothing_again() -> None:
    flow = prefilling()
    flow.on_prefill_reply(P0, FIRST, PrefillGrant())
    flow.on_node_lost(P0)
    flow.on_choice(D1, P1, "why", 12.0)
    flow.on_reserve_reply(D1, SECOND, TICKET, 13.0)
    assert flow.on_prefill_reply(P1, SECOND, PrefillGrant()) == []
    early = prefilling()
    assert emitted(early.on_output(P0, output(FIRST, 0, 10))) == [10]
    assert early.on_prefill_reply(P0, FIRST, PrefillGrant()) == [], "its token said so"
    started = reserving(None)
    started.on_output(D0, output(FIRST, 0, is_started=True))
    assert Accepted() in started.on_reserve_reply(D0, FIRST, LOCAL, 11.0)
