"""Tokens of a running answer are taken in one look; whatever else an output says is left to
`on_output`, which takes it as if it had not been looked at."""

from __future__ import annotations

import pytest

from common.errors import PeerProtocolError
from common.ids import Incarnation
from common.request import (
    FinishReason,
    OutputDetails,
    RequestCounts,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from router.core.attempts import State
from router.core.generation import PromptResult, TokenChunk
from router.core.request_flow import RequestFlow
from router.core.token_ledger import TokenLedger
from tests.unit.router.core.flow_events import (
    D0,
    D1,
    FIRST,
    LOCAL,
    P0,
    SECOND,
    emitted,
    output,
    prefilling,
    reserving,
    running,
    suspected,
)


def test_tokens_of_a_running_answer_are_taken_in_order() -> None:
    flow = running()
    first = flow.next_tokens(D0, output(FIRST, 1, 11))
    second = flow.next_tokens(D0, output(FIRST, 2, 12, 13, num_drafted=2, num_accepted=1))
    third = flow.next_tokens(D0, output(FIRST, 4, 14, num_cached_tokens=70))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [chunk.token_ids for chunk in (first, second, third)] == [(11,), (12, 13), (14,)]
    assert (first.counts, second.counts) == (None, RequestCounts(64, 2, 1))
    assert (third.first_index, third.counts) == (4, RequestCounts(70, 2, 1))
    assert flow.num_output_tokens == 5
    assert emitted(flow.on_output(D0, output(FIRST, 5, 15))) == [15]


@pytest.mark.parametrize(
    ("flow", "node", "left", "wanted"),
    [
        (running(), D0, output(FIRST, 1, 11, finish=FinishReason.STOP), [11]),
        (running(), D0, output(FIRST, 2, 12), []),
        (running(), D0, output(FIRST, 0, 10), []),
        (running(), D0, output(FIRST, 1), []),
        (running(), D1, output(FIRST, 1, 11), []),
        (running(), P0, output(FIRST, 1, 11), []),
        (running(), D0, output(SECOND, 1, 11), []),
        (running(first_token=False), D0, output(FIRST, 1, 11), []),
        (prefilling(), P0, output(FIRST, 0, 10), [10]),
        (suspected(), D0, output(FIRST, 1, 11), [11]),
        (suspected(), D1, output(SECOND, 1, 11), [11]),
    ],
    ids=[
        "end",
        "gap",
        "again",
        "nothing",
        "other node",
        "left node",
        "other attempt",
        "token 0 is missing",
        "prefill",
        "first of two",
        "second of two",
    ],
)
def test_anything_else_is_left_to_the_whole_machine(
    flow: RequestFlow, node: Incarnation, left: RequestOutput, wanted: list[int]
) -> None:
    assert flow.next_tokens(node, left) is None
    assert emitted(flow.on_output(node, left)) == wanted


def test_tokens_behind_the_last_one_are_still_an_error() -> None:
    ledger = TokenLedger(SamplingParams(max_tokens=3))
    assert ledger.push(output(FIRST, 0, 10), 0) is not None
    too_many = output(FIRST, 1, 11, 12, 13)
    assert ledger.take_next(too_many) is None
    with pytest.raises(PeerProtocolError, match="token index 3, max_tokens is 3"):
        ledger.push(too_many, 0)
    assert ledger.emitted == [10]


def test_log_probabilities_are_left_to_the_whole_machine() -> None:
    ledger = TokenLedger(SamplingParams(max_tokens=8, logprobs=0))
    first, second = (
        output(FIRST, index, 10 + index)._replace(
            details=OutputDetails(logprobs=(TokenLogprobs(-1.0),))
        )
        for index in range(2)
    )
    assert ledger.push(first, 0) is not None
    assert ledger.take_next(second) is None
    chunk = ledger.push(second, 0)
    assert chunk is not None
    assert chunk.logprobs == (TokenLogprobs(-1.0),)


def test_the_first_tokens_of_an_attempt_that_continues_start_it() -> None:
    flow = suspected()
    flow.on_node_lost(D0)
    assert flow.state is State.LOCAL
    assert flow.next_tokens(D1, output(SECOND, 1, 11)) is None
    assert emitted(flow.on_output(D1, output(SECOND, 1, 11))) == [11]
    assert flow.next_tokens(D1, output(SECOND, 2, 12)) is not None


def test_token_0_is_left_to_the_whole_machine_which_reads_its_times() -> None:
    flow = reserving()
    flow.on_reserve_reply(D0, FIRST, LOCAL, 11.0)
    flow.on_output(D0, output(FIRST, 0, is_started=True))
    token_0 = output(FIRST, 0, 10)._replace(details=OutputDetails(queue_s=0.5))
    assert flow.next_tokens(D0, token_0) is None
    _, chunk = flow.on_output(D0, token_0)
    assert isinstance(chunk, TokenChunk)
    assert chunk.of_prompt == PromptResult(queue_s=0.5)
