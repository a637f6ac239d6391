"""Closing: a generator is closed by the time its reader is done, whatever ended the reading."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from common.errors import InternalError
from common.request import SamplingParams
from router.choice_streams import choice_deltas, merged
from router.core.choice_text import ChoiceText, Delta
from tests.fakes.http_edge import ScriptedGenerator, never_ends, says, tiny_model


def choice(
    generator: ScriptedGenerator, deltas: list[Delta], *, has_logprobs: bool = False
) -> AsyncGenerator[Delta, None]:
    text = ChoiceText(tiny_model().new_detokenizer(), (), has_logprobs=has_logprobs)
    chunks = generator.generate((5,), SamplingParams(max_tokens=9), deadline_s=1.0)
    return choice_deltas(chunks, text, deltas.append)


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_early_closes_all(n: int) -> None:
    generator = ScriptedGenerator(never_ends())
    deltas: list[Delta] = []
    stream = merged([choice(generator, deltas) for _ in range(n)])
    index, delta = await anext(stream)
    assert (index, delta.text) == (0, "x")
    await stream.aclose()
    assert generator.calls
    assert all(call.closed.is_set() for call in generator.calls)


async def test_an_error_while_reading_closes() -> None:
    generator = ScriptedGenerator(never_ends())
    with pytest.raises(InternalError, match="logprobs"):
        await anext(choice(generator, [], has_logprobs=True))
    assert generator.calls[0].closed.is_set()


@pytest.mark.parametrize("n", [1, 3])
async def test_every_delta_arrives_once_in_order(n: int) -> None:
    generator = ScriptedGenerator(says("Hello world, the quick brown fox"))
    counted: list[Delta] = []
    texts = [""] * n
    async for index, delta in merged([choice(generator, counted) for _ in range(n)]):
        texts[index] += delta.text
    assert texts == ["Hello world, the quick brown fox"] * n
    assert len(counted) == sum(call.num_pulled for call in generator.calls)
    assert all(call.closed.is_set() for call in generator.calls)
