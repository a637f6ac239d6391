"""Log-probabilities in the two shapes of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.text.output.choice_text import LogprobEntry

LOWEST_LOGPROB = -9999.0
"""Represents minus infinity, which JSON does not have; other LLM servers use the same number."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token shown on its own: its bytes, and a text that is unique to these bytes.

    Bytes that are not whole characters are shown as `bytes:\\xe2\\x82`.
    """

    text: str
    raw: bytes


DescribeToken = Callable[[int], TokenText]


def token_text(raw: bytes) -> TokenText:
    """Return how a token with these bytes is shown."""
    try:
        return TokenText(raw.decode(), raw)
    except UnicodeDecodeError:
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


def chat_token(entry: LogprobEntry, describe: DescribeToken) -> dict[str, object]:
    """Return an element of `choices[].logprobs.content` of chat completions."""
    assert entry.logprobs is not None, "a chat does not echo its prompt"
    top = [_chat_token(describe(token), logprob) for token, logprob in entry.logprobs.top]
    drawn = _chat_token(describe(entry.token_id), entry.logprobs.logprob)
    return drawn | {"top_logprobs": top}


def _chat_token(token: TokenText, logprob: float) -> dict[str, object]:
    return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.raw)}


def _token(entry: LogprobEntry, describe: DescribeToken) -> str:
    return describe(entry.token_id).text


def _logprob(entry: LogprobEntry, _: DescribeToken) -> float | None:
    return None if entry.logprobs is None else finite(entry.logprobs.logprob)


def _top(entry: LogprobEntry, describe: DescribeToken) -> dict[str, float] | None:
    if entry.logprobs is None:
        return None
    top: dict[str, float] = {}
    # Two tokens may have the same text, as a letter and its byte do: the likeliest comes first.
    for token, logprob in (*entry.logprobs.top, (entry.token_id, entry.logprobs.logprob)):
        top.setdefault(describe(token).text, finite(logprob))
    return top


def _offset(entry: LogprobEntry, _: DescribeToken) -> int:
    return entry.text_offset


COMPLETION_COLUMNS: Mapping[str, Callable[[LogprobEntry, DescribeToken], object]] = {
    "tokens": _token,
    "token_logprobs": _logprob,
    "top_logprobs": _top,
    "text_offset": _offset,
}
"""The lists of `choices[].logprobs` of completions: what each has for a token.

A token itself is always among the top ones. Of the first token of an echoed prompt nothing is
known: it has null.
"""


def finite(logprob: float) -> float:
    """Return a log probability that JSON can show."""
    return max(logprob, LOWEST_LOGPROB)
