"""Tokens of several nodes in one order, compared with a model that is a dictionary."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import PeerProtocolError
from common.ids import AttemptId
from common.prompt_logprobs import PromptLogprobs
from common.request import (
    NO_COUNTS,
    FinishReason,
    RequestCounts,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from router.core.generation import PromptResult
from router.core.token_ledger import TokenLedger
from tests.support.nodes.node_outputs import node_output

MAX_TOKENS = 8
ID = AttemptId("req", 1)
LENGTH = FinishReason.LENGTH

outputs = st.builds(
    node_output,
    attempt=st.just(ID),
    first_index=st.integers(0, MAX_TOKENS - 3),
    token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    num_cached_tokens=st.integers(0, 2),
    num_drafted=st.integers(0, 1),
    finish_reason=st.sampled_from([None, None, None, None, LENGTH]),
)


@pytest.mark.covers("F87", "T01")
@given(st.lists(outputs, max_size=20), st.booleans())
def test_each_index_is_emitted_once_and_its_first_arrival_counts(
    news: list[RequestOutput], has_logprobs: bool
) -> None:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, logprobs=0 if has_logprobs else None)
    ledger = TokenLedger(sampling)
    known: dict[int, int] = {}
    emitted: list[int] = []
    cached, counts = 0, NO_COUNTS
    for output in news:
        found = tuple(TokenLogprobs(-float(token)) for token in output.token_ids)
        marked = output._replace(details=replace(output.details, logprobs=found))
        try:
            chunk = ledger.push(marked, 0)
        except PeerProtocolError:
            return
        cached = max(cached, (output.counts or NO_COUNTS).num_cached_tokens)
        for index, token in enumerate(output.token_ids, output.first_index):
            known.setdefault(index, token)
        end = output.first_index + len(output.token_ids) if output.token_ids else None
        before = len(emitted)
        reason = output.details.finish_reason
        while len(emitted) in known and not (reason and len(emitted) == end):
            emitted.append(known[len(emitted)])
        assert (chunk is not None) == (len(emitted) > before or reason is LENGTH)
        if chunk is not None:
            assert chunk.first_index == before
            assert list(chunk.token_ids) == emitted[before:]
            counts = chunk.counts or counts
            assert counts.num_cached_tokens == cached
            assert chunk.finish_reason is reason
            wanted = [-float(token) for token in chunk.token_ids] if has_logprobs else []
            assert [entry.logprob for entry in chunk.logprobs] == wanted
        assert ledger.emitted == emitted
        assert ledger.num_emitted == len(emitted)
        if reason is not None:
            return


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (node_output(ID, 6, (1, 2, 3)), "token index 8"),
        (node_output(ID, 1, (2,), finish_reason=LENGTH), "without"),
        (node_output(ID, 0, (), finish_reason=LENGTH), "ended at 0 tokens"),
    ],
)
def test_what_no_node_may_send_changes_nothing(output: RequestOutput, words: str) -> None:
    ledger = TokenLedger(SamplingParams(max_tokens=MAX_TOKENS))
    with pytest.raises(PeerProtocolError, match=words):
        ledger.push(output, 0)
    assert ledger.emitted == []
    ledger = ledger.continued()
    chunk = ledger.push(node_output(ID, 0, (7, 8)), 0)
    assert chunk is not None
    assert chunk.token_ids == (7, 8)


SCORES = PromptLogprobs(1, (-0.5, -1.5), (1, 2), (7, 8), (-0.5, -1.0))
ASKED = SamplingParams(max_tokens=MAX_TOKENS, prompt_logprobs=1)


@pytest.mark.covers("T26")
def test_logprobs_of_the_prompt_come_with_token_0_and_once() -> None:
    ledger = TokenLedger(ASKED, 3)
    assert ledger.push(node_output(ID, 1, (5,)), 0) is None, "the decode node runs ahead"
    first = ledger.push(node_output(ID, 0, (4,), prompt_logprobs=SCORES), 0)
    assert first is not None
    assert first.of_prompt is not None
    assert (first.token_ids, first.of_prompt.prompt_logprobs) == ((4, 5), SCORES)
    assert SCORES not in vars(ledger).values(), "they are large, and an answer may be long"
    again = node_output(ID, 0, (4,), prompt_logprobs=SCORES)
    assert ledger.push(again, 0) is None
    after = ledger.push(node_output(ID, 2, (6,)), 0)
    assert after is not None
    assert after.of_prompt is None


def test_a_second_attempt_brings_the_logprobs_that_the_first_one_did_not() -> None:
    first = TokenLedger(ASKED, 3)
    chunk = first.continued().push(node_output(ID, 0, (4,), prompt_logprobs=SCORES), 0)
    assert chunk is not None
    assert chunk.of_prompt is not None
    assert chunk.of_prompt.prompt_logprobs == SCORES
    first.push(node_output(ID, 0, (4,), prompt_logprobs=SCORES), 0)
    chunk = first.continued().push(node_output(ID, 1, (5,)), 0)
    assert chunk is not None
    assert chunk.of_prompt is None


@pytest.mark.parametrize(("scores", "num_prompt", "found"), [(None, 3, 0), (SCORES, 4, 2)])
def test_token_0_without_all_logprobs_of_the_prompt_is_an_error(
    scores: PromptLogprobs | None, num_prompt: int, found: int
) -> None:
    output = node_output(ID, 0, (4,), prompt_logprobs=scores)
    with pytest.raises(PeerProtocolError, match=f"logprobs of {found} tokens of the prompt"):
        TokenLedger(ASKED, num_prompt).push(output, 0)


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    chunk = TokenLedger(ASKED, 1).push(node_output(ID, 0, (4,)), 0)
    assert chunk is not None
    assert chunk.of_prompt is not None
    assert chunk.of_prompt.prompt_logprobs is None


def test_the_first_arrival_of_an_index_counts() -> None:
    ledger = TokenLedger(SamplingParams(max_tokens=MAX_TOKENS))
    assert ledger.push(node_output(ID, 2, (5,)), 0) is None
    assert ledger.push(node_output(ID, 2, (6,)), 0) is None
    chunk = ledger.push(node_output(ID, 0, (1, 1), queue_s=2.0, compute_s=3.0), 0)
    assert chunk is not None
    assert chunk.token_ids == (1, 1, 5)
    assert chunk.of_prompt == PromptResult(queue_s=2.0, compute_s=3.0)
    assert ledger.push(node_output(ID, 1, (9, 9)), 0) is None
    chunk = ledger.push(node_output(ID, 3, (7,)), 0)
    assert chunk is not None
    assert (chunk.first_index, chunk.token_ids) == (3, (7,))
    assert chunk.of_prompt is None, "they are token 0's"


def test_what_is_said_of_the_prompt_comes_with_token_0_once() -> None:
    ledger = TokenLedger(SamplingParams(max_tokens=MAX_TOKENS))
    first = ledger.push(node_output(ID, 0, (1,), compute_s=3.0), 0)
    assert first is not None
    assert first.of_prompt == PromptResult(queue_s=0.0, compute_s=3.0)
    again = ledger.push(node_output(ID, 0, (1, 2), compute_s=4.0), 0)
    assert again is not None
    assert (again.first_index, again.token_ids, again.of_prompt) == (1, (2,), None)


def test_a_new_attempt_goes_on_behind_what_was_emitted() -> None:
    ledger = TokenLedger(SamplingParams(max_tokens=MAX_TOKENS))
    ledger.push(node_output(ID, 0, (1, 2), num_drafted=3, num_accepted=1), 0)
    assert ledger.push(node_output(ID, 4, (5,)), 0) is None
    ledger = ledger.continued()
    assert ledger.push(node_output(ID, 3, (4,), num_drafted=2), 0) is None
    chunk = ledger.push(node_output(ID, 2, (3,), num_cached_tokens=9), 0)
    assert chunk is not None
    assert (chunk.first_index, chunk.token_ids) == (2, (3, 4))
    assert chunk.counts == RequestCounts(0, 5, 1)


def test_drafts_are_not_accepted_by_an_attempt_whose_tokens_were_lost() -> None:
    ledger = TokenLedger(SamplingParams(max_tokens=MAX_TOKENS))
    ledger.push(node_output(ID, 0, (1, 2), num_drafted=3, num_accepted=1), 0)
    ledger = ledger.continued()
    assert ledger.push(node_output(ID, 3, (4,), num_drafted=2, num_accepted=2), 0) is None
    chunk = ledger.continued().push(node_output(ID, 2, (3,)), 0)
    assert chunk is not None
    assert chunk.counts == RequestCounts(0, 5, 1)
