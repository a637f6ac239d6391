"""The short way of a streamed answer: it writes what the long one sends, or nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import pytest
from starlette.types import Message

from common.request import FinishReason
from router.core.generation import TakeChunks, TokenChunk
from router.http.exchange import Reply
from router.openai.answer_stream import AnswerStream
from router.openai.choice_streams import Group
from router.openai.formats import AnswerHead, ChatFormat
from router.text.choice_text import ChoiceText, Delta
from router.text.usage import Usage
from tests.fakes.http_edge import chunks, tiny_model

TEXT = "Hello world, the quick brown fox"
HEAD = AnswerHead(id="chatcmpl-1", created_s=1, model="tiny")


class Client:
    """Its answer, and whether it keeps up. Parts written directly and sent ones arrive as one."""

    def __init__(self) -> None:
        self.body = b""
        self.num_written = 0
        self.keeps_up = True
        self.deltas: list[Delta] = []
        self.text = ChoiceText(tiny_model().new_detokenizer(), ())
        form = ChatFormat(
            HEAD, tiny_model().describe_token, has_logprobs=False, has_usage_events=True
        )
        self.usage = Usage((3,), 1)
        self.stream = AnswerStream(form, self.usage, Reply(self._send, self._write), 1)

    async def _send(self, message: Message) -> None:
        self.body += message.get("body", b"")

    def _write(self, part: bytes) -> bool:
        if self.keeps_up:
            self.body += part
            self.num_written += bool(part)
        return self.keeps_up

    def take(self) -> TakeChunks:
        return self.stream.taker(self.text, self.deltas.extend)

    async def answered(
        self, parts: Sequence[TokenChunk], offer: Callable[[Sequence[TokenChunk]], bool]
    ) -> bytes:
        async def groups() -> AsyncGenerator[Group, None]:
            for part in parts:
                if not offer([part]):
                    deltas = self.text.push_all([part])
                    self.deltas.extend(deltas)
                    yield 0, deltas

        await self.stream.send_all(groups())
        return self.body


def answer() -> list[TokenChunk]:
    return chunks(tiny_model().encode(TEXT, add_special_tokens=False, param="text"))


async def long_way() -> Client:
    client = Client()
    await client.answered(answer(), lambda _: False)
    return client


async def test_both_ways_say_and_count_the_same() -> None:
    client, long = Client(), await long_way()
    taken: list[bool] = []
    take = client.take()

    def offer(part: Sequence[TokenChunk]) -> bool:
        taken.append(take(part))
        return taken[-1]

    assert await client.answered(answer(), offer) == long.body
    assert taken == [False] + [True] * (len(taken) - 2) + [False], "not the first, not the last"
    assert len(taken) > 3
    assert client.deltas == long.deltas
    assert client.usage.as_json() == long.usage.as_json()


async def test_a_client_that_does_not_keep_up_is_waited_for() -> None:
    client, long = Client(), await long_way()
    take = client.take()
    num_offers = 0

    def offer(part: Sequence[TokenChunk]) -> bool:
        nonlocal num_offers
        num_offers += 1
        client.keeps_up = num_offers % 2 == 0
        is_taken = take(part)
        assert not (is_taken and not client.keeps_up)
        return is_taken

    assert await client.answered(answer(), offer) == long.body
    assert 0 < client.num_written < num_offers


async def test_tokens_without_text_yet_are_taken_and_nothing_is_written() -> None:
    client = Client()
    take = client.take()
    ids = tiny_model().encode("a\U0001f600b", add_special_tokens=False, param="text")
    parts = chunks(ids)
    assert len(parts) > 4, "an emoji of several tokens"
    body = await client.answered(parts, take)
    assert "\U0001f600".encode() in body
    assert [delta.num_tokens for delta in client.deltas] == [1] * len(parts)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
async def test_the_end_of_an_answer_travels_with_its_last_token(finish: FinishReason) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    client = Client()
    stream = AnswerStream(client.stream.form, client.usage, Reply(send), 1)

    async def groups() -> AsyncGenerator[Group, None]:
        yield 0, client.text.push_all([TokenChunk(0, answer()[0].token_ids)])
        yield 0, client.text.push_all([TokenChunk(1, answer()[1].token_ids, (), finish)])

    await stream.send_all(groups())
    start, first, last = sent
    assert (start["status"], first["more_body"], last["more_body"]) == (200, True, False)
    assert f'"finish_reason":"{finish.value}"'.encode() in last["body"]
    assert last["body"].endswith(b"data: [DONE]\n\n")
