"""Log probabilities of a prompt's own tokens as JSON, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.prompt_logprobs import PromptLogprobs
from router.http.sse import to_json
from router.text.logprobs_json import DescribeToken, finite

_TOKENS_PER_PART = 128
"""Tokens of a prompt whose JSON is made at once: 2,700 log probabilities at most."""


def prompt_logprobs_json(
    token_ids: Sequence[int],
    num_top: int,
    found: PromptLogprobs | None,
    describe: DescribeToken,
) -> Iterator[str]:
    """Yield the parts of a JSON list, null and then one object for each further token, as vLLM has.

    An object has the token's own id and those of the `num_top` likeliest, each with log
    probability, rank and text.
    """
    yield "[null"
    for first in range(0, 0 if found is None else len(found), _TOKENS_PER_PART):
        assert found is not None
        end = min(first + _TOKENS_PER_PART, len(found))
        described = [
            _described(token_ids[place + 1], place, num_top, found, describe)
            for place in range(first, end)
        ]
        yield f",{to_json(described)[1:-1]}"
    yield "]"


def _described(
    token_id: int, place: int, num_top: int, found: PromptLogprobs, describe: DescribeToken
) -> dict[str, object]:
    ranked = [(token_id, found.logprobs[place], found.ranks[place])]
    tops = enumerate(found.top(place, num_top), 1)
    ranked += [(top_id, logprob, rank) for rank, (top_id, logprob) in tops if top_id != token_id]
    return {
        str(one): {"logprob": finite(logprob), "rank": rank, "decoded_token": describe(one).text}
        for one, logprob, rank in ranked
    }
