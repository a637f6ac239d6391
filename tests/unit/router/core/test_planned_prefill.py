"""The leg of a prefill node counts from its choice on, and is closed once."""

from __future__ import annotations

import pytest

from common.errors import Overloaded
from router.core.effects import LegClosed, SendPrefill, SendReserve
from tests.unit.router.core.flow_events import (
    D0,
    FIRST,
    LOCAL,
    P0,
    P1,
    TICKET,
    aborts,
    new_flow,
    output,
    reserving,
)


def test_a_prefill_node_counts_from_its_choice_on() -> None:
    flow = new_flow()
    (reserve,) = flow.on_choice(D0, P0, "why", 10.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.prefill == P0
    prefill, _ = flow.on_reserve_reply(D0, FIRST, TICKET, 12.0)
    assert isinstance(prefill, SendPrefill)
    assert prefill.is_counted
    flow.on_prefill_reply(P0, FIRST, Overloaded("full"))
    prefill, _ = flow.on_choice(D0, P1, "next", 13.0)
    assert isinstance(prefill, SendPrefill)
    assert not prefill.is_counted


@pytest.mark.parametrize("end", ["client gone", "lost", "output"])
def test_a_planned_prefill_node_is_given_up_once(end: str) -> None:
    flow = reserving()
    if end == "client gone":
        effects = flow.on_client_gone()
    elif end == "lost":
        effects = flow.on_node_lost(D0)
    else:
        effects = flow.on_output(D0, output(FIRST, 0, 10, is_started=True))
        effects += flow.on_reserve_reply(D0, FIRST, LOCAL, 0.0)
    assert effects.count(LegClosed(P0, is_prefill=True)) == 1
    assert (P0, FIRST) not in aborts(effects), "it was not asked"
