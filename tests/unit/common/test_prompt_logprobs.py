"""Log probabilities of prompts as columns, and how many a request may have."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from common.prompt_logprobs import MAX_ENTRIES, PromptLogprobs, joined
from common.request import SamplingParams
from tests.support.engine.build import make_request

TWO = PromptLogprobs(2, (-1.0, -2.0), (1, 9), (4, 5, 6, 7), (-1.0, -1.5, -0.5, -1.0))


def test_parts_are_joined_in_order() -> None:
    one = PromptLogprobs(2, (-3.0,), (2,), (8, 9), (-0.25, -3.0))
    whole = joined([TWO, one])
    assert whole.logprobs == (-1.0, -2.0, -3.0)
    assert [whole.top(index, 2) for index in range(3)] == [
        ((4, -1.0), (5, -1.5)),
        ((6, -0.5), (7, -1.0)),
        ((8, -0.25), (9, -3.0)),
    ]
    assert whole.is_well_formed


def test_fewer_likeliest_tokens_can_be_read_and_no_more_than_there_are() -> None:
    assert TWO.top(1, 0) == ()
    assert TWO.top(1, 1) == ((6, -0.5),)
    assert TWO.top(0, 9) == TWO.top(0, 2)


def test_a_request_has_a_bounded_number() -> None:
    prompt = (1,) * (MAX_ENTRIES // 5)
    make_request(prompt, prompt_logprobs=4)
    make_request(prompt, logprobs=20)
    with pytest.raises(InvalidRequest, match=r"120000 log probabilities .* at most 100000"):
        make_request(prompt, prompt_logprobs=5)


@pytest.mark.parametrize("count", [-1, 21])
def test_the_number_of_likeliest_tokens_has_bounds(count: int) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs is .*: wanted 0 to 20"):
        SamplingParams(max_tokens=1, prompt_logprobs=count)
