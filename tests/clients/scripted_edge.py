"""The API over a model that answers what the last turn of a user spells between « and »."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from unittest.mock import patch

from common.request import FinishReason
from router.core.generation import TokenChunk
from tests.support.http.http_edge import make_edge
from tests.support.http.http_server import served
from tests.support.http.scripted_generator import Call, chunks
from tests.support.http.tool_models import hermes_model

_SPELLED = re.compile("«(.*?)»", re.DOTALL)
RESULT_ANSWER = "It is sunny."
"""What is answered to the result of a call."""
SLOW = "Take your time"
"""A turn with these words gets its first token behind some pings."""
_PING_S = 0.02


@asynccontextmanager
async def scripted_edge() -> AsyncIterator[int]:
    """Serve the API; the block gets the port."""
    with patch("router.api.answers.answer.PING_S", _PING_S):
        async with served(make_edge(_play, model=hermes_model(8192)).app) as port:
            yield port


async def _play(call: Call) -> AsyncIterator[TokenChunk]:
    call.accept()
    if SLOW in hermes_model(8192).decode(call.prompt_token_ids):
        await asyncio.sleep(10 * _PING_S)
    for chunk in _chunks(call):
        yield chunk


def _chunks(call: Call) -> Iterator[TokenChunk]:
    model = hermes_model(8192)
    turns = model.decode(call.prompt_token_ids, with_special_tokens=True).split("<|im_start|>")
    last = [turn for turn in turns if turn.startswith("user")][-1]
    spelled = _SPELLED.findall(last)
    text = RESULT_ANSWER if "<tool_response>" in last else spelled[-1] if spelled else "Hello"
    ids = [*model.encode(text, add_special_tokens=False, param=""), *sorted(model.eos_token_ids)]
    return iter(chunks(ids, FinishReason.STOP, num_logprobs=call.sampling.logprobs, size=2))
