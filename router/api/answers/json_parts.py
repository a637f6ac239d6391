"""JSON of what may be long, in parts: no part takes more than some milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from common.prompt_logprobs import PromptLogprobs
from router.http.sse import to_json
from router.text.output.choice_text import LogprobEntry
from router.text.output.logprobs_json import COMPLETION_COLUMNS, DescribeToken, chat_token, finite

LOGPROBS_PER_PART = 1000
"""Log probabilities of one part, alternatives included: 5 ms of JSON in the shape of chats."""

_IDS_PER_PART = 8192


def num_logprobs(entries: Sequence[LogprobEntry]) -> int:
    """Return how many log probabilities these entries have; all have as many but the first."""
    return len(entries) * _per_entry(entries)


def in_parts(*lists: Sequence[LogprobEntry]) -> Iterator[Sequence[LogprobEntry]]:
    """Yield all entries, in parts of at most `LOGPROBS_PER_PART` log probabilities."""
    for entries in lists:
        step = max(1, LOGPROBS_PER_PART // _per_entry(entries))
        for first in range(0, len(entries), step):
            yield entries[first : first + step]


def chat_logprobs_json(
    lists: Sequence[Sequence[LogprobEntry]], describe: DescribeToken
) -> Iterator[str]:
    """Yield `choices[].logprobs` of chat completions: those of all `lists`."""
    yield '{"content":'
    yield from _list_json(lists, chat_token, describe)
    yield ',"refusal":null}'


def completion_logprobs_json(
    lists: Sequence[Sequence[LogprobEntry]], describe: DescribeToken
) -> Iterator[str]:
    """Yield `choices[].logprobs` of completions: those of all `lists`."""
    start = "{"
    for name, column in COMPLETION_COLUMNS.items():
        yield f'{start}"{name}":'
        yield from _list_json(lists, column, describe)
        start = ","
    yield "}"


def ids_json(token_ids: Sequence[int]) -> Iterator[str]:
    """Yield a list of token ids."""
    return _joined(
        to_json(token_ids[first : first + _IDS_PER_PART])
        for first in range(0, len(token_ids), _IDS_PER_PART)
    )


def _list_json(
    lists: Sequence[Sequence[LogprobEntry]],
    shown: Callable[[LogprobEntry, DescribeToken], object],
    describe: DescribeToken,
) -> Iterator[str]:
    return _joined(to_json([shown(one, describe) for one in part]) for part in in_parts(*lists))


def _joined(lists: Iterable[str]) -> Iterator[str]:
    start = "["
    for text in lists:
        yield start + text[1:-1]
        start = ","
    yield "[]" if start == "[" else "]"


def _per_entry(entries: Sequence[LogprobEntry]) -> int:
    last = entries[-1].logprobs if entries else None
    return 1 if last is None else 1 + len(last.top)


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
