"""Log-probabilities in the two shapes of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.text.choice_text import LogprobEntry

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


def chat_logprobs(entries: Sequence[LogprobEntry], describe: DescribeToken) -> dict[str, object]:
    """Return `choices[].logprobs` of chat completions."""
    content = []
    for entry in entries:
        assert entry.logprobs is not None, "a chat does not echo its prompt"
        top = [_chat_token(describe(token), logprob) for token, logprob in entry.logprobs.top]
        drawn = _chat_token(describe(entry.token_id), entry.logprobs.logprob)
        content.append(drawn | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token: TokenText, logprob: float) -> dict[str, object]:
    return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.raw)}


def completion_logprobs(
    entries: Sequence[LogprobEntry], describe: DescribeToken
) -> dict[str, object]:
    """Return `choices[].logprobs` of completions; a token itself is always among the top ones.

    Of the first token of an echoed prompt nothing is known: it has null.
    """
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprobs is None:
            tops.append(None)
            continue
        top = {describe(token).text: finite(logprob) for token, logprob in entry.logprobs.top}
        top.setdefault(describe(entry.token_id).text, finite(entry.logprobs.logprob))
        tops.append(top)
    return {
        "tokens": [describe(entry.token_id).text for entry in entries],
        "token_logprobs": [
            None if entry.logprobs is None else finite(entry.logprobs.logprob) for entry in entries
        ],
        "top_logprobs": tops,
        "text_offset": [entry.text_offset for entry in entries],
    }


def finite(logprob: float) -> float:
    """Return a log probability that JSON can show."""
    return max(logprob, LOWEST_LOGPROB)
