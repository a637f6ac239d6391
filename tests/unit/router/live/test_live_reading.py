"""In which phase the live page shows a request, along every way that it can go."""

from __future__ import annotations

from typing import Any

from common.ids import AttemptId, Incarnation
from common.kv.prompt_blocks import PromptBlocks
from common.request import RequestOutput, SamplingParams
from router.core.request_flow import DecodeGrant, RequestFlow
from router.live.reading import LiveRequest, Phase, live_requests
from tests.support.nodes.node_outputs import node_output

P0, D0, D1 = Incarnation("p0", 1), Incarnation("d0", 1), Incarnation("d1", 1)
FIRST, SECOND = AttemptId("req", 1), AttemptId("req", 2)


def new_flow() -> RequestFlow:
    flow = RequestFlow(
        "req", PromptBlocks((1, 2, 3)), SamplingParams(max_tokens=8), deadline_at_s=60.0
    )
    flow.start()
    return flow


def output(attempt: AttemptId, first_index: int, *token_ids: int, **more: Any) -> RequestOutput:
    return node_output(attempt, first_index=first_index, token_ids=token_ids, **more)


def shown(flow: RequestFlow) -> tuple[Phase, Incarnation | None, Incarnation | None]:
    (request,) = live_requests([flow])
    assert request == LiveRequest("req", request.phase, request.decode, request.prefill)
    return request.phase, request.decode, request.prefill


def test_a_handoff() -> None:
    flow = new_flow()
    assert shown(flow) == (Phase.PLACING, None, None)
    flow.on_choice(D0, P0, "why", 10.0)
    assert shown(flow) == (Phase.PLACING, D0, None)
    flow.on_reserve_reply(D0, FIRST, DecodeGrant("ticket", 0), 11.0)
    assert shown(flow) == (Phase.PREFILL, D0, P0)
    flow.on_output(P0, output(FIRST, 0, 10))
    assert shown(flow) == (Phase.TRANSFER, D0, P0)
    flow.on_output(D0, output(FIRST, 1, is_started=True))
    assert shown(flow) == (Phase.DECODE, D0, None)


def test_a_local_prefill() -> None:
    flow = new_flow()
    flow.on_choice(D0, None, "why", 10.0)
    flow.on_reserve_reply(D0, FIRST, DecodeGrant(None, 0), 11.0)
    assert shown(flow) == (Phase.PREFILL, D0, None)
    flow.on_output(D0, output(FIRST, 0, 10, is_started=True))
    assert shown(flow) == (Phase.DECODE, D0, None)


def test_another_attempt_begins_with_its_placing() -> None:
    flow = new_flow()
    flow.on_choice(D0, P0, "why", 10.0)
    flow.on_reserve_reply(D0, FIRST, DecodeGrant("ticket", 0), 11.0)
    flow.on_node_lost(P0)
    assert shown(flow) == (Phase.PLACING, None, None)
    flow.on_choice(D1, None, "why", 12.0)
    flow.on_reserve_reply(D1, SECOND, DecodeGrant(None, 0), 13.0)
    assert shown(flow) == (Phase.PREFILL, D1, None)
