"""The short way of an answer's next tokens: it does what the long one does, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import AttemptId, Incarnation
from common.request import FinishReason, RequestOutput, SamplingParams
from router.core.effects import Effect, EmitTokens
from router.core.request_flow import RequestFlow
from tests.unit.router.core.test_request_flow import (
    D0,
    D1,
    FIRST,
    P0,
    SECOND,
    new_flow,
    output,
    prefilling,
    running,
)

MAX_TOKENS = 8


def fed(flow: RequestFlow, node: Incarnation, news: RequestOutput) -> list[Effect]:
    """As the dispatcher feeds it."""
    chunk = flow.next_tokens(node, news)
    return flow.on_output(node, news) if chunk is None else [EmitTokens(chunk)]


def started() -> RequestFlow:
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    flow = RequestFlow("req", (1, 2, 3), sampling, deadline_at_s=60.0)
    flow.start()
    flow.on_choice(D0, None, "why", 10.0)
    return flow


outputs = st.builds(
    RequestOutput,
    id=st.sampled_from([FIRST, FIRST, FIRST, SECOND, AttemptId("other", 1)]),
    first_index=st.integers(0, MAX_TOKENS),
    token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    num_cached_tokens=st.integers(0, 2),
    num_drafted=st.integers(0, 1),
    is_started=st.booleans(),
    finish_reason=st.sampled_from([None, None, None, FinishReason.LENGTH, FinishReason.ABORT]),
)


@given(st.lists(st.tuples(st.sampled_from([D0, D0, D0, D1]), outputs), max_size=20))
def test_both_ways_lead_to_the_same(news: list[tuple[Incarnation, RequestOutput]]) -> None:
    short, long = started(), started()
    for node, one in news:
        # In words, as two errors are never equal.
        assert repr(fed(short, node, one)) == repr(long.on_output(node, one))
        assert short.state is long.state
        assert short.has_first_token == long.has_first_token


@given(st.lists(st.integers(1, 3), max_size=6))
def test_answers_in_order_take_it_behind_their_first_token(sizes: list[int]) -> None:
    flow = started()
    fed(flow, D0, RequestOutput(FIRST, 0, (7,), is_started=True))
    index = 1
    for size in sizes:
        token_ids = tuple(range(size))
        chunk = flow.next_tokens(D0, RequestOutput(FIRST, index, token_ids))
        assert (chunk is not None) == (index + size <= MAX_TOKENS)
        if chunk is None:
            return
        assert (chunk.first_index, chunk.token_ids) == (index, token_ids)
        index += size


@pytest.mark.parametrize(
    "news",
    [
        output(FIRST, 2, 5),
        output(FIRST, 0, 5),
        output(FIRST, 1),
        output(SECOND, 1, 5),
        output(FIRST, 1, 5, finish=FinishReason.LENGTH),
        output(FIRST, 1, 5, num_drafted=1),
        output(FIRST, 1, 5, num_cached_tokens=65),
        output(FIRST, 1, 5, 6, 7, 8, 9, 10, 11, 12),
    ],
)
def test_other_news_go_the_long_way_and_are_not_taken(news: RequestOutput) -> None:
    flow = running()
    assert flow.next_tokens(D0, news) is None
    chunk = flow.next_tokens(D0, output(FIRST, 1, 5))
    assert chunk is not None, "the next tokens are still the next"


def test_nobody_elses_tokens_take_it() -> None:
    assert running().next_tokens(D1, output(FIRST, 1, 5)) is None
    assert running().next_tokens(P0, output(FIRST, 1, 5)) is None
    assert prefilling().next_tokens(D0, output(FIRST, 0, 5)) is None
    assert new_flow().next_tokens(D0, output(FIRST, 0, 5)) is None
    assert running(first_token=False).next_tokens(D0, output(FIRST, 1, 5)) is None
