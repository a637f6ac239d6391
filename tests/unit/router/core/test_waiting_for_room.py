"""A request whose candidates are all full waits in the queue of one of them, asked once more."""

from __future__ import annotations

from common.errors import Overloaded
from common.ids import AttemptId, Incarnation
from common.kv.prompt_blocks import PromptBlocks
from common.request import SamplingParams
from router.core.effects import Choose, Effect, Fail, LegClosed, SendPrefill, SendReserve
from router.core.request_flow import DecodeGrant, RequestFlow

P0, D0, D1 = (Incarnation(name, 1) for name in ("p0", "d0", "d1"))
FIRST = AttemptId("req", 1)
FULL = Overloaded("no room", retry_after_s=2.0)
NONE_LEFT = Overloaded("every decode node was tried", retry_after_s=1.0)


def both_full() -> tuple[RequestFlow, list[Effect]]:
    """Both decode nodes refused once; the effects of learning that no third one exists."""
    flow = RequestFlow(
        "req", PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=8), deadline_at_s=60.0
    )
    flow.start()
    for node in (D0, D1):
        (reserve,) = flow.on_choice(node, P0, "why", 10.0)
        assert isinstance(reserve, SendReserve)
        assert not reserve.may_wait
        flow.on_reserve_reply(node, FIRST, FULL, 10.0)
    return flow, flow.on_no_choice(NONE_LEFT)


def test_all_full_means_waiting_at_one_of_them() -> None:
    flow, effects = both_full()
    assert effects == [Choose(None, frozenset())]
    (reserve,) = flow.on_choice(D1, P0, "why", 11.0)
    assert isinstance(reserve, SendReserve)
    assert (reserve.node, reserve.may_wait, reserve.request.id) == (D1, True, FIRST)
    effects = flow.on_reserve_reply(D1, FIRST, DecodeGrant("ticket", 0), 30.0)
    assert any(isinstance(effect, SendPrefill) for effect in effects)


def test_a_full_queue_leads_to_the_next_and_then_to_a_refusal() -> None:
    flow, _ = both_full()
    flow.on_choice(D1, P0, "why", 11.0)
    effects = flow.on_reserve_reply(D1, FIRST, FULL, 12.0)
    assert effects == [LegClosed(D1), LegClosed(P0, has_prompt=True), Choose(None, frozenset({D1}))]
    flow.on_choice(D0, P0, "why", 12.0)
    effects = flow.on_reserve_reply(D0, FIRST, FULL, 13.0)
    assert effects == [
        LegClosed(D0),
        LegClosed(P0, has_prompt=True),
        Choose(None, frozenset({D0, D1})),
    ]
    (failed,) = flow.on_no_choice(NONE_LEFT)
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, Overloaded)
    assert failed.error.retry_after_s == 2.0
    assert str(failed.error) == "every decode node was tried; d0#1 said last: no room"
