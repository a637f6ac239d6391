"""The helpers of the official `openai` client, unchanged: parse, tools, streams, responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from common.request import FinishReason
from router.tools.formats import HERMES
from tests.integration.openai_clients import client_of
from tests.support.http import tool_models
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import hermes_model

PARIS = '{"city": "Paris"}'
ONE = HERMES.call_text("get_weather", PARIS)
TWO = "I look.\n" + ONE + "\n" + HERMES.call_text("now", "{}")
WEATHER: Any = tool_models.WEATHER
NOW: Any = tool_models.NOW
ASKED: Any = [{"role": "user", "content": "Weather in Paris?"}]


def edge_that_says(text: str) -> Edge:
    return make_edge(says(text, size=2), model=hermes_model())


class Mood(BaseModel):
    mood: str
    reasons: list[str]


async def test_parse_with_a_model_of_pydantic() -> None:
    text = '{"mood": "good", "reasons": ["sun"]}'
    async with client_of(edge_that_says(text)) as client:
        answer = await client.chat.completions.parse(
            model="tiny", messages=ASKED, response_format=Mood
        )
    assert answer.choices[0].message.parsed == Mood(mood="good", reasons=["sun"])


class GetWeather(BaseModel):
    city: str


async def test_parse_of_a_call() -> None:
    text = HERMES.call_text("GetWeather", PARIS)
    async with client_of(edge_that_says(text)) as client:
        answer = await client.chat.completions.parse(
            model="tiny", messages=ASKED, tools=[openai.pydantic_function_tool(GetWeather)]
        )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris")


@pytest.mark.parametrize("is_beta", [False, True])
async def test_the_stream_helper_puts_calls_together(is_beta: bool) -> None:
    edge = edge_that_says(TWO)
    async with client_of(edge) as client:
        chat = client.beta.chat if is_beta else client.chat
        asked = chat.completions.stream(model="tiny", messages=ASKED, tools=[WEATHER, NOW])
        async with asked as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    (choice,) = final.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    calls = choice.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        ("get_weather", PARIS),
        ("now", "{}"),
    ]


async def test_a_loop_with_tools() -> None:
    edge = edge_that_says(ONE)
    messages: list[Any] = list(ASKED)
    async with client_of(edge) as client:
        first = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[WEATHER],
        )
        message = first.choices[0].message
        messages.append(message)
        calls: Any = message.tool_calls
        for call in calls:
            assert json.loads(call.function.arguments) == {"city": "Paris"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        edge.generator.script = says("It is sunny.")
        second = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[WEATHER],
        )
    assert second.choices[0].message.content == "It is sunny."
    prompt = edge.model.decode(edge.generator.calls[1].prompt_token_ids)
    assert "<tool_response>sunny</tool_response>" in prompt


FUNCTION: Any = {"type": "function", **WEATHER["function"]}


async def test_a_response() -> None:
    async with client_of(edge_that_says("Hello")) as client:
        answer = await client.responses.create(
            model="tiny", instructions="Be brief.", input="Hi", max_output_tokens=50
        )
    assert (answer.output_text, answer.status) == ("Hello", "completed")
    assert (answer.instructions, answer.max_output_tokens) == ("Be brief.", 50)
    assert answer.usage is not None
    assert answer.usage.output_tokens == answer.usage.total_tokens - answer.usage.input_tokens


async def test_a_response_that_was_cut_off() -> None:
    edge = make_edge(says("Hello", FinishReason.LENGTH), model=hermes_model())
    async with client_of(edge) as client:
        answer = await client.responses.create(model="tiny", input="Hi")
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_a_response_with_a_schema() -> None:
    async with client_of(edge_that_says('{"mood": "good", "reasons": []}')) as client:
        answer = await client.responses.parse(model="tiny", input="Hi", text_format=Mood)
    assert answer.output_parsed == Mood(mood="good", reasons=[])


async def test_a_conversation_of_responses_with_a_tool() -> None:
    edge = edge_that_says("I look.\n" + ONE)
    history: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    async with client_of(edge) as client:
        first = await client.responses.create(
            model="tiny",
            input=history,
            tools=[FUNCTION],
            tool_choice="auto",
        )
        history += first.output
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (call.name, call.arguments) == ("get_weather", PARIS)
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
        edge.generator.script = says("It is sunny.")
        second = await client.responses.create(model="tiny", input=history, tools=[FUNCTION])
    assert second.output_text == "It is sunny."
    prompt = edge.model.decode(edge.generator.calls[1].prompt_token_ids)
    assert f"assistant\nI look.{ONE}" in prompt
    assert "<tool_response>sunny</tool_response>" in prompt


async def test_a_stream_of_a_response() -> None:
    edge = edge_that_says("\nhm</think>" + TWO)
    tools: Any = [FUNCTION, {"type": "function", **NOW["function"]}]
    async with client_of(edge) as client:
        stream: Any = await client.responses.create(
            model="tiny",
            input="Hi",
            tools=tools,
            stream=True,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
        events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    final = events[-1]
    assert final.type == "response.completed"
    assert [item.type for item in final.response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert final.response.output_text == "I look."
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.id for item in final.response.output]
    arguments = [
        event.delta
        for event in events
        if event.type == "response.function_call_arguments.delta" and event.output_index == 2
    ]
    assert "".join(arguments) == PARIS
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "I look."


async def test_the_stream_helper_of_responses() -> None:
    async with (
        client_of(edge_that_says('{"mood": "good", "reasons": []}')) as client,
        client.responses.stream(model="tiny", input="Hi", text_format=Mood) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_parsed == Mood(mood="good", reasons=[])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
    ],
)
async def test_what_responses_do_not_have_is_named(fields: dict[str, Any], param: str) -> None:
    async with client_of(edge_that_says("x")) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**({"model": "tiny", "input": "Hi"} | fields))
    assert caught.value.param == param
