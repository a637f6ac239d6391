"""Events and effects of a request flow."""

from __future__ import annotations

from typing import Any

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.kv.prompt_blocks import PromptBlocks
from common.request import FinishReason, RequestOutput, SamplingParams
from router.core.attempts import State
from router.core.effects import (
    Choose,
    Effect,
    Fail,
    SendAbort,
    SendReserve,
)
from router.core.generation import TokenChunk
from router.core.request_flow import DecodeGrant, RequestFlow
from tests.support.nodes.node_outputs import node_output

P0, P1 = Incarnation("p0", 1), Incarnation("p1", 1)
D0, D1 = Incarnation("d0", 1), Incarnation("d1", 1)
FIRST, SECOND = (AttemptId("req", number) for number in (1, 2))
TICKET = DecodeGrant("ticket", 64)
LOCAL = DecodeGrant(None, 32)


def new_flow(
    max_tokens: int = 8,
    logprobs: int | None = None,
    *,
    min_tokens: int = 0,
    is_cut_to_fit: bool = False,
) -> RequestFlow:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, logprobs=logprobs)
    flow = RequestFlow(
        "req",
        PromptBlocks((1, 2, 3)),
        sampling,
        deadline_at_s=60.0,
        is_cut_to_fit=is_cut_to_fit,
    )
    assert flow.start() == [Choose(None, frozenset())]
    return flow


def reserving(prefill: Incarnation | None = P0, **asked: Any) -> RequestFlow:
    flow = new_flow(**asked)
    (reserve,) = flow.on_choice(D0, prefill, "why", 10.0)
    assert isinstance(reserve, SendReserve)
    assert (reserve.node, reserve.must_prefill_locally) == (D0, prefill is None)
    return flow


def prefilling(**asked: Any) -> RequestFlow:
    flow = reserving(**asked)
    flow.on_reserve_reply(D0, FIRST, TICKET, 11.0)
    assert flow.state is State.PREFILLING
    return flow


def running(*, first_token: bool = True, **asked: Any) -> RequestFlow:
    """`asked` is for `new_flow`, here and above."""
    flow = prefilling(**asked)
    if first_token:
        flow.on_output(P0, output(FIRST, 0, 10))
    flow.on_output(D0, output(FIRST, 1, is_started=True))
    assert flow.state is State.RUNNING
    return flow


def output(
    attempt: AttemptId,
    first: int,
    *token_ids: int,
    finish: FinishReason | None = None,
    is_started: bool = False,
    error: PdserveError | None = None,
    **counts: int,
) -> RequestOutput:
    return node_output(
        attempt,
        first,
        token_ids,
        finish_reason=FinishReason.ERROR if error else finish,
        is_started=is_started,
        error_code=error.code if error else "",
        error_message=str(error or ""),
        **counts,
    )


def emitted(effects: list[Effect]) -> list[int]:
    chunks = [effect for effect in effects if isinstance(effect, TokenChunk)]
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def failure(effects: list[Effect]) -> PdserveError:
    (fail,) = [effect for effect in effects if isinstance(effect, Fail)]
    return fail.error


def aborts(effects: list[Effect]) -> set[tuple[Incarnation, AttemptId]]:
    return {(e.node, e.attempt) for e in effects if isinstance(e, SendAbort)}


def suspected() -> RequestFlow:
    """Token 0 is emitted; d0 runs and is silent; d1 computes the same answer."""
    flow = running()
    assert flow.on_node_suspected(D0) == [Choose(None, frozenset({D0}))]
    (reserve,) = flow.on_choice(D1, None, "another node", 10.0)
    assert isinstance(reserve, SendReserve)
    assert (reserve.node, reserve.request.id) == (D1, SECOND)
    assert reserve.request.output_token_ids == (10,)
    flow.on_reserve_reply(D1, SECOND, LOCAL, 10.0)
    return flow
