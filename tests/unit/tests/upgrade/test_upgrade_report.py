"""The report of an upgrade: only a router that is being replaced may refuse a request."""

from __future__ import annotations

import pytest

from tests.soak.clients import Ended, Try
from tests.upgrade.handoffs import Handoffs
from tests.upgrade.report import complaints
from tests.upgrade.rollout import Replaced

FIRST = Replaced("router-1", "this", stopped_s=100.0, exited_s=102.0, ready_s=105.0)
SECOND = Replaced("router-2", "this", stopped_s=105.1, exited_s=107.0, ready_s=110.0)


def found(*tries: Try) -> list[str]:
    one = Ended("stream", tries[0].began_s, 120.0, 20, [], tries=tries)
    return [text for text in complaints([one], [FIRST, SECOND], Handoffs()) if "refused" in text]


ANSWER = Try(1, 105.4, 120.0)


@pytest.mark.parametrize(
    "refused",
    [
        (),
        (Try(1, 104.9, 104.95),),
        (Try(1, 99.0, 100.1),),
        (Try(1, 104.9, 104.95), Try(2, 105.2, 105.25)),
    ],
    ids=["none", "within", "closed by its stop", "of both"],
)
def test_a_router_that_is_being_replaced_may_refuse(refused: tuple[Try, ...]) -> None:
    assert found(*refused, ANSWER) == []


@pytest.mark.parametrize(
    "refused",
    [Try(2, 104.9, 104.95), Try(1, 99.0, 99.5), Try(1, 105.05, 105.06)],
    ids=["another router", "before its stop", "after it was ready"],
)
def test_no_other_router_may_refuse(refused: Try) -> None:
    [complaint] = found(refused, ANSWER)
    assert f"router-{refused.router} refused it at {refused.began_s - 100.0:.1f} s" in complaint


def test_one_refusal_is_accepted_and_the_next_one_is_not() -> None:
    [complaint] = found(Try(1, 104.9, 104.95), Try(2, 104.97, 104.98), ANSWER)
    assert "router-2" in complaint
