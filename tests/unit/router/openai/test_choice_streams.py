"""Closing: a generator is closed by the time its reader is done, whatever ended the reading."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest

from common.errors import InternalError
from common.request import FinishReason, SamplingParams
from router.core.generation import TokenChunk
from router.openai.choice_streams import Group, choice_deltas, merged
from router.text.choice_text import ChoiceText, Delta
from tests.fakes.http_edge import ScriptedGenerator, chunks, never_ends, says, tiny_model


def choice(
    generator: ScriptedGenerator, deltas: list[Delta], index: int = 0, *, has_logprobs: bool = False
) -> AsyncGenerator[Group, None]:
    text = ChoiceText(tiny_model().new_detokenizer(), (), has_logprobs=has_logprobs)
    groups = generator.generate((5,), SamplingParams(max_tokens=9), deadline_s=1.0)
    return choice_deltas(index, groups, text, deltas.extend)


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_early_closes_all(n: int) -> None:
    generator = ScriptedGenerator(never_ends())
    deltas: list[Delta] = []
    stream = merged([choice(generator, deltas, index) for index in range(n)])
    index, first = await anext(stream)
    assert (index, [delta.text for delta in first]) == (0, ["x"])
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
    async for index, deltas in merged([choice(generator, counted, place) for place in range(n)]):
        texts[index] += "".join(delta.text for delta in deltas)
    assert texts == ["Hello world, the quick brown fox"] * n
    assert len(counted) == sum(call.num_pulled for call in generator.calls)
    assert all(call.closed.is_set() for call in generator.calls)


async def in_one_group(chunks: Sequence[TokenChunk]) -> AsyncGenerator[Sequence[TokenChunk], None]:
    yield chunks


async def test_chunks_that_came_together_leave_together_and_apart() -> None:
    ids = tiny_model().encode("Hello world", add_special_tokens=False, param="text")
    text = ChoiceText(tiny_model().new_detokenizer(), ())
    groups = [group async for _, group in choice_deltas(0, in_one_group(chunks(ids)), text, len)]
    assert [len(group) for group in groups] == [len(ids)]
    assert "".join(delta.text for delta in groups[0]) == "Hello world"


async def test_nothing_is_shown_behind_a_stop_string_in_the_same_group() -> None:
    ids = tiny_model().encode("Hello world, good night", add_special_tokens=False, param="text")
    text = ChoiceText(tiny_model().new_detokenizer(), ("world",))
    groups = [group async for _, group in choice_deltas(0, in_one_group(chunks(ids)), text, len)]
    (deltas,) = groups
    assert "".join(delta.text for delta in deltas) == "Hello "
    assert [delta.finish_reason for delta in deltas[-2:]] == [None, FinishReason.STOP]
    assert len(deltas) < len(ids)
