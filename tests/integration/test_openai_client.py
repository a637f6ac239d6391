"""The official `openai` client, unchanged, against the edge on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from common.errors import DeadlineExceeded, NodeLost, Overloaded, PoolExhausted
from common.request import RequestCounts
from router.api.answers.answer import PING_S
from router.core.generation import TokenChunk
from tests.integration.openai_clients import client_of
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.http.edge_model import tiny_model
from tests.support.http.http_edge import make_edge
from tests.support.http.http_server import served
from tests.support.http.scripted_generator import (
    TURNS_TO_THE_CLIENT,
    Call,
    chunks,
    fails,
    hangs_after,
    says,
)

MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Hi"}]


async def test_chat() -> None:
    async with client_of(make_edge(says("Hello world", num_cached=3))) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer._request_id is not None


async def test_chat_stream_with_usage_and_two_choices() -> None:
    async with client_of(make_edge()) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, reasons, usage = ["", ""], [""] * 2, None
        async for part in stream:
            usage = part.usage or usage
            for choice in part.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == ["Hello world"] * 2
    assert reasons == ["stop"] * 2
    assert usage is not None
    assert usage.completion_tokens == 6


async def drafting(_: Call) -> AsyncIterator[TokenChunk]:
    ids = tiny_model().encode("Hello world", add_special_tokens=False, param="p")
    first, last = chunks(ids)
    yield first._replace(counts=RequestCounts(0, 4, 0))
    yield last._replace(counts=RequestCounts(0, 6, 1))


async def test_usage_tells_accepted_and_rejected_drafts() -> None:
    async with client_of(make_edge(drafting)) as client:
        whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
        stream = await client.completions.create(
            model="tiny", prompt="a", stream=True, stream_options={"include_usage": True}
        )
        usages = [whole.usage, *[part.usage async for part in stream if part.usage]]
    found = []
    for usage in usages:
        assert usage is not None
        details = usage.completion_tokens_details
        assert details is not None
        found.append((details.accepted_prediction_tokens, details.rejected_prediction_tokens))
    assert found == [(2, 10), (1, 5)]


async def test_a_priority_is_an_extra_field() -> None:
    edge = make_edge()
    async with client_of(edge) as client:
        await client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"priority": 10}
        )
        assert edge.generator.calls[0].priority == 10
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="a", extra_body={"priority": 1001})
    assert bad.value.param == "priority"


async def test_chat_logprobs() -> None:
    async with client_of(make_edge()) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["Hello", " world"]
    assert logprobs.content[0].bytes == list(b"Hello")
    assert len(logprobs.content[0].top_logprobs) == 2


async def test_completions_with_the_fields_that_are_not_openais() -> None:
    edge = make_edge()
    async with client_of(edge) as client:
        answer = await client.completions.create(
            model="tiny",
            prompt=["a", "b"],
            logprobs=1,
            max_tokens=5,
            seed=3,
            stop=["zz"],
            extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
        )
    assert [choice.text for choice in answer.choices] == ["Hello world"] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["Hello", " world"]
    sampling = edge.generator.calls[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.ignore_eos) == (4, 0.1, True)


async def test_completion_stream() -> None:
    async with client_of(make_edge()) as client:
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join([part.choices[0].text async for part in stream]) == "Hello world"


async def test_models() -> None:
    async with client_of(make_edge()) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "pdserve"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_bad_requests_name_the_field() -> None:
    async with client_of(make_edge()) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_request")
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="tiny", prompt=[5] * 300)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(model="tiny", prompt="x" * (20 << 20))
        assert large.value.status_code == 413


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full"), 503),
        (PoolExhausted("no block left"), 503),
        (DeadlineExceeded("late"), 504),
        (NodeLost("gone"), 502),
    ],
)
async def test_errors_of_the_cluster(error: Exception, status: int) -> None:
    async with client_of(make_edge(fails(error))) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match=str(error)) as caught:
                await client.completions.create(model="tiny", prompt="a", stream=stream)
            assert caught.value.status_code == status


async def test_a_stream_that_breaks_off_raises() -> None:
    ids = tiny_model().encode("Hello", add_special_tokens=False, param="p")
    script = fails(NodeLost("node d1 is gone"), after=[TokenChunk(first_index=0, token_ids=ids)])
    async with client_of(make_edge(script)) as client:
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        assert (await anext(stream)).choices[0].text == "Hello"
        with pytest.raises(openai.APIError, match="d1 is gone"):
            await anext(stream)


@pytest.mark.covers("W06")
@pytest.mark.parametrize("is_whole", [True, False])
async def test_pings_are_skipped_and_an_error_behind_them_is_raised(is_whole: bool) -> None:
    time = StoppedTime()

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        call.accept()
        for _ in range(3):
            for _ in range(TURNS_TO_THE_CLIENT):
                await asyncio.sleep(0)
            time.advance(PING_S)
        await asyncio.sleep(0)
        for chunk in chunks(tiny_model().encode("Hello", add_special_tokens=False, param="")):
            if not is_whole:
                raise NodeLost("gone")
            yield chunk

    async with client_of(make_edge(play, clock=time)) as client:
        try:
            for texts in (chat_texts, completion_texts, response_texts):
                if is_whole:
                    assert "".join([text async for text in texts(client)]) == "Hello"
                else:
                    with pytest.raises((openai.APIError, ResponseFailed), match="gone"):
                        await anext(texts(client))
        finally:
            time.go_on()


class ResponseFailed(Exception):
    """The client gives a failed response to its caller."""


async def chat_texts(client: openai.AsyncOpenAI) -> AsyncIterator[str]:
    async for part in await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True
    ):
        yield part.choices[0].delta.content or ""


async def completion_texts(client: openai.AsyncOpenAI) -> AsyncIterator[str]:
    async for part in await client.completions.create(model="tiny", prompt="a", stream=True):
        yield part.choices[0].text


async def response_texts(client: openai.AsyncOpenAI) -> AsyncIterator[str]:
    async with client.responses.stream(model="tiny", input="Hi") as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta
            if event.type == "response.failed":
                assert event.response.error is not None
                raise ResponseFailed(event.response.error.message)


async def test_keys() -> None:
    edge = make_edge(api_key="secret")
    async with client_of(edge, api_key="secret") as client:
        await client.completions.create(model="tiny", prompt="a")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").completions.create(model="tiny", prompt="a")


async def test_closing_a_stream_ends_the_generator() -> None:
    first = chunks(tiny_model().encode("Hello world", add_special_tokens=False, param="p"))[:1]
    edge = make_edge(hangs_after(first))
    async with client_of(edge) as client:
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(60):
            await edge.generator.calls[0].closed.wait()


@contextmanager
def sync_client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        yield client


async def test_the_synchronous_client() -> None:
    def use(port: int) -> tuple[str | None, str]:
        with sync_client(port) as client:
            answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
            parts = client.completions.create(model="tiny", prompt="a", stream=True)
            text = "".join(part.choices[0].text for part in parts)
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="tiny", prompt="")
            return answer.choices[0].message.content, text

    async with served(make_edge().app) as port:
        assert await asyncio.to_thread(use, port) == ("Hello world", "Hello world")
