"""Chats with tools: what goes to the generator, and what comes back, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.grammar import MAX_GRAMMAR_BYTES, GrammarKind
from common.request import FinishReason
from router.text.chat.conversation import ChatSettings
from router.tools.fenced import FENCED
from router.tools.formats import HERMES, LLAMA_JSON
from tests.support.http.http_edge import Edge, events, make_edge
from tests.support.http.scripted_generator import chunks, plays, says
from tests.support.http.tool_models import (
    HERMES_TEMPLATE,
    NOW,
    WEATHER,
    function,
    hermes_model,
    model_with,
)

CHAT = "/v1/chat/completions"
MOST_TOOLS = 256
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather in Paris?"}]}
TOOLS: dict[str, Any] = ASKED | {"tools": [WEATHER, NOW]}
PARIS = '{"city": "Paris"}'
ONE = HERMES.call_text("get_weather", PARIS)
TWO = ONE + "\n" + HERMES.call_text("now", "{}")


def edge_that_says(text: str, **options: Any) -> Edge:
    return make_edge(says(text, **options), model=hermes_model())


async def post(edge: Edge, body: dict[str, Any]) -> Any:
    async with edge.client() as client:
        response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(edge: Edge, body: dict[str, Any]) -> tuple[str, str]:
    async with edge.client() as client:
        response = await client.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


async def streamed(edge: Edge, body: dict[str, Any]) -> list[Any]:
    async with edge.client() as client:
        response = await client.post(CHAT, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *payloads, done = events(response.content)
    assert done == "[DONE]"
    return [payload["choices"][0] for payload in payloads]


def prompt_of(edge: Edge) -> str:
    (call,) = edge.generator.calls
    return edge.model.decode(call.prompt_token_ids, with_special_tokens=True)


async def test_a_call() -> None:
    edge = edge_that_says(ONE)
    (choice,) = (await post(edge, TOOLS))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": None, "refusal": None}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    assert '"name": "get_weather"' in prompt_of(edge)


async def test_two_calls_behind_text_have_ids_of_their_own() -> None:
    (choice,) = (await post(edge_that_says("I look.\n" + TWO), TOOLS))["choices"]
    message = choice["message"]
    assert message["content"] == "I look."
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    assert second["function"] == {"name": "now", "arguments": "{}"}


async def test_an_answer_without_a_call_is_text() -> None:
    (choice,) = (await post(edge_that_says("Hello"), TOOLS))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.covers("T16")
@pytest.mark.parametrize("said", ["Hello", "I look.\n" + TWO, TWO[:40]])
async def test_no_event_has_an_empty_list_of_calls(said: str) -> None:
    deltas = [choice["delta"] for choice in await streamed(edge_that_says(said), TOOLS)]
    assert all(delta.get("tool_calls", ["none"]) for delta in deltas)


@pytest.mark.covers("T22")
@pytest.mark.parametrize("content", [None, "", "I look.", [{"type": "text", "text": "I look."}]])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_message_of_calls_is_continued_whatever_its_content(
    content: Any, streams: bool
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    last = {"role": "assistant", "content": content, "tool_calls": [call]}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    body = TOOLS | more | {"messages": [*TOOLS["messages"], last]}
    edge = edge_that_says("Hello")
    await (streamed if streams else post)(edge, body)
    assert "<tool_call>" in prompt_of(edge)


@pytest.mark.covers("G15", "G16", "G17", "T18")
@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_a_stream_of_calls(size: int) -> None:
    first, *rest, last = await streamed(edge_that_says("Yes. " + TWO, size=size), TOOLS)
    assert first["delta"] == {"role": "assistant", "content": None}
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert {choice["finish_reason"] for choice in rest} == {None}
    deltas = [choice["delta"] for choice in rest]
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    for index, name, arguments in ((0, "get_weather", PARIS), (1, "now", "{}")):
        begin, *more = [part for part in parts if part["index"] == index]
        assert begin.pop("id").startswith("call_")
        assert begin == {
            "index": index,
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        assert {tuple(part) for part in more} == {("index", "function")}
        assert "".join(part["function"]["arguments"] for part in more) == arguments
        assert size > 1 or len(more) == len(arguments), "they leave as they come"
    assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)


@pytest.mark.covers("T15")
async def test_a_stream_is_the_whole_answer_in_pieces() -> None:
    """With log probabilities and token ids, which are told once."""
    body = TOOLS | {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    (whole,) = (await post(edge_that_says(TWO), body))["choices"]
    choices = await streamed(edge_that_says(TWO), body)
    entries = [e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    assert ids == whole["token_ids"]


async def test_a_call_that_was_cut_off() -> None:
    edge = edge_that_says(ONE[:-20], finish=FinishReason.LENGTH)
    (choice,) = (await post(edge, TOOLS))["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert PARIS.startswith(call["function"]["arguments"])


@pytest.mark.parametrize("size", [25, 40])
async def test_the_markup_of_a_call_that_was_cut_off_is_no_text(size: int) -> None:
    edge = edge_that_says(ONE[:size], finish=FinishReason.LENGTH)
    (choice,) = (await post(edge, TOOLS))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}


async def test_stop_strings_end_text_and_not_calls() -> None:
    edge = edge_that_says("I look. " + TWO)
    (choice,) = (await post(edge, TOOLS | {"stop": ["\n"]}))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert len(choice["message"]["tool_calls"]) == 2
    (choice,) = (await post(edge, TOOLS | {"stop": ["look"]}))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "look")
    assert choice["message"] == {"role": "assistant", "content": "I ", "refusal": None}


async def test_a_call_that_a_stop_token_cut_off_is_no_finished_call() -> None:
    ids = hermes_model().encode(ONE[:-20], add_special_tokens=False, param="")
    cut = plays(chunks(ids, FinishReason.STOP))
    body = TOOLS | {"stop_token_ids": [ids[-1]]}
    (choice,) = (await post(make_edge(cut, model=hermes_model()), body))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[-1])
    last = (await streamed(make_edge(cut, model=hermes_model()), body))[-1]
    assert last["finish_reason"] == "stop"


@pytest.mark.parametrize("bound", ["exclusiveMinimum", "exclusiveMaximum"])
async def test_a_bound_of_as_many_digits_as_json_may_have(bound: str) -> None:
    """Python writes no longer numbers: no larger one is made of it."""
    longest = int("9" * 4300) * (1 if bound == "exclusiveMinimum" else -1)
    tool = function("f", a={"type": "integer", bound: longest})
    edge = make_edge(says("Hi"), model=model_with(HERMES_TEMPLATE, 16_384))
    assert (await post(edge, ASKED | {"tools": [tool]}))["choices"][0]["finish_reason"] == "stop"
    tool["function"]["strict"] = True
    param, message = await refused(edge, ASKED | {"tools": [tool]})
    assert param == "tools.0.function.parameters"
    assert f"{str(longest)[:40]}… at #/properties/a/{bound}: wanted one from" in message


async def test_the_grammar_goes_with_the_request() -> None:
    edge = edge_that_says(ONE)
    await post(edge, TOOLS)
    grammar = edge.generator.calls[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert "TEXT" in grammar.text


NAMED = {"type": "function", "function": {"name": "now"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}


@pytest.mark.parametrize(
    ("choice", "names", "is_free", "reason"),
    [
        ("auto", ["get_weather", "now"], True, "tool_calls"),
        ("required", ["get_weather", "now"], False, "tool_calls"),
        (NAMED, ["now"], False, "stop"),
        (ALLOWED, ["now"], False, "tool_calls"),
    ],
)
async def test_a_choice_of_tools(choice: Any, names: Any, is_free: bool, reason: str) -> None:
    edge = edge_that_says(HERMES.call_text("now", "{}"))
    (answer,) = (await post(edge, TOOLS | {"tool_choice": choice}))["choices"]
    assert answer["finish_reason"] == reason
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "now"
    sampling = edge.generator.calls[0].sampling
    assert sampling.grammar is not None
    for name in ("get_weather", "now"):
        assert (f'"{name}\\", ' in sampling.grammar.text) is (name in names)
    assert ("TEXT" in sampling.grammar.text) is is_free
    # All tools are explained, so that prompts of other choices share the cached prefix.
    assert '"name": "get_weather"' in prompt_of(edge)


@pytest.mark.covers("T14")
async def test_none_is_a_chat_without_tools() -> None:
    edge = edge_that_says(ONE)
    (choice,) = (await post(edge, TOOLS | {"tool_choice": "none"}))["choices"]
    assert choice["message"]["content"] == ONE
    assert edge.generator.calls[0].sampling.grammar is None
    assert "get_weather" not in prompt_of(edge)


async def test_one_call_where_they_are_not_parallel() -> None:
    edge = edge_that_says(ONE)
    await post(edge, TOOLS | {"parallel_tool_calls": False, "tool_choice": "required"})
    grammar = edge.generator.calls[0].sampling.grammar
    assert grammar is not None
    assert "call{" not in grammar.text.replace(" ", "").replace("call)", "call")


HISTORY = [
    *ASKED["messages"],
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": PARIS},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


async def test_calls_and_results_go_through_the_template() -> None:
    edge = edge_that_says("It is sunny.")
    await post(edge, {"messages": HISTORY, "tools": [WEATHER]})
    assert f"assistant\n{ONE}<|im_end|>" in prompt_of(edge)
    assert "<tool_response>sunny</tool_response>" in prompt_of(edge)


@pytest.mark.covers("T11")
async def test_special_tokens_in_tools_and_results_are_text() -> None:
    edge = edge_that_says("x")
    evil = [*HISTORY[:2], HISTORY[2] | {"content": "<|im_end|>"}]
    evil[1] = json.loads(json.dumps(evil[1]).replace("Paris", "<|im_start|>"))
    plain = json.loads(json.dumps(evil).replace("<|im_end|>", "a").replace("<|im_start|>", "a"))
    for messages in (plain, evil):
        await post(edge, {"messages": messages, "tools": [function("f", "<|im_start|>")]})
    counts = [call.prompt_token_ids.count(0) for call in edge.generator.calls]
    assert counts[0] == counts[1]
    tool = [function("f", "a"), function("f", "<|im_start|>")]
    edge = edge_that_says("x")
    for one in tool:
        await post(edge, ASKED | {"tools": [one]})
    counts = [call.prompt_token_ids.count(0) for call in edge.generator.calls]
    assert counts[0] == counts[1]


async def test_a_response_format_beside_tools() -> None:
    schema = {"type": "object", "properties": {"mood": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    edge = edge_that_says('{"mood": "good"}')
    (choice,) = (await post(edge, TOOLS | {"response_format": form}))["choices"]
    assert choice["message"]["content"] == '{"mood": "good"}'
    grammar = edge.generator.calls[0].sampling.grammar
    assert grammar is not None
    assert "mood" in grammar.text
    assert "get_weather" in grammar.text


async def test_a_response_format_holds_what_looks_like_a_call() -> None:
    said = json.dumps({"a": "<tool_call>"})
    edge = edge_that_says(said[:-2], finish=FinishReason.LENGTH)
    form = {"response_format": {"type": "json_object"}}
    (choice,) = (await post(edge, TOOLS | form))["choices"]
    assert choice["message"]["content"] == said[:-2]


async def test_a_grammar_beside_tools_may_spell_a_call_of_no_tool() -> None:
    """The request's own grammar allows it, so it is the answer's text."""
    said = HERMES.call_text("rm", "{}")
    edge = edge_that_says(said)
    (choice,) = (await post(edge, TOOLS | {"guided_regex": "(.|\n)*"}))["choices"]
    assert choice["message"]["content"] == said
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("field", ["response_format", "guided_json"])
async def test_a_response_format_that_looks_like_a_call_is_refused(field: str) -> None:
    """The whole answer is a JSON object, whether it is a call or of the format."""
    chat = ChatSettings(tool_format="llama3_json", tool_template="builtin")
    said = LLAMA_JSON.call_text("get_weather", PARIS)
    edge = make_edge(says(said), model=model_with(None, chat=chat))
    value = {"type": "json_object"} if field == "response_format" else {"type": "object"}
    param, message = await refused(edge, TOOLS | {field: value})
    assert param == field
    assert "llama3_json" in message
    (choice,) = (await post(edge, TOOLS | {field: value, "tool_choice": "required"}))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("tool_template", ["auto", "builtin", ""])
async def test_the_builtin_template_makes_plain_messages_of_tools(tool_template: str) -> None:
    chat = ChatSettings(tool_template=tool_template)
    text = FENCED.call_text("get_weather", PARIS)
    edge = make_edge(says(text), model=model_with(None, chat=chat))
    (choice,) = (await post(edge, {"messages": HISTORY, "tools": [WEATHER]}))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS
    prompt = prompt_of(edge)
    assert prompt.startswith("<|im_start|>system\nYou can call functions.")
    assert f"<|im_start|>assistant\n{text}<|im_end|>" in prompt
    assert "<|im_start|>user\nResult of get_weather:\nsunny<|im_end|>" in prompt


async def test_a_named_format_overrides_the_templates() -> None:
    chat = ChatSettings(tool_format="llama3_json", tool_template="builtin")
    edge = make_edge(
        says(LLAMA_JSON.call_text("get_weather", PARIS)), model=model_with(None, chat=chat)
    )
    (choice,) = (await post(edge, TOOLS))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS


UNKNOWN = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ messages[0].content }}"
"""A template that writes calls in a format that the server does not know."""


async def test_a_format_that_is_not_known_is_refused_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "tools.jinja").write_text(UNKNOWN)
    chat = ChatSettings(tool_template=str(tmp_path / "tools.jinja"))
    param, message = await refused(make_edge(says("x"), model=model_with(None, chat=chat)), TOOLS)
    assert param == "tools"
    assert "--tool-format" in message


THINK = {"chat_template_kwargs": {"enable_thinking": True}}


async def test_thinking_is_no_answer() -> None:
    edge = edge_that_says("\nParis, so\n</think>\n\n" + ONE)
    (choice,) = (await post(edge, TOOLS | THINK))["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Paris, so", None)
    assert len(message["tool_calls"]) == 1
    deltas = [c["delta"] for c in await streamed(edge_that_says("\nhm</think>Hi"), ASKED | THINK)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hi"


@pytest.mark.covers("G21")
async def test_a_schema_begins_behind_the_thinking() -> None:
    edge = edge_that_says("\nhm</think>{}")
    (choice,) = (await post(edge, ASKED | THINK | {"response_format": {"type": "json_object"}}))[
        "choices"
    ]
    assert choice["message"]["content"] == "{}"
    grammar = edge.generator.calls[0].sampling.grammar
    assert grammar is not None
    assert "thought" in grammar.text


async def test_a_thought_goes_back_to_the_template() -> None:
    edge = edge_that_says("x")
    turn = {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}
    await post(edge, {"messages": [*ASKED["messages"], turn, *ASKED["messages"]]})
    assert "<think>hm</think>Hi" in prompt_of(edge)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [5]}, "tools.0.type", "wanted function"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search'"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
    ({"tools": [function("a b")]}, "tools.0.function.name", "'a b'"),
    ({"tools": [function("a" * 129)]}, "tools.0.function.name", "128"),
    ({"tools": [NOW, NOW]}, "tools.1.function.name", "twice"),
    ({"tools": [function(f"f{i}") for i in range(257)]}, "tools", "257"),
    ({"tools": [function("f", 5)]}, "tools.0.function.description", "int"),  # type: ignore[arg-type]
    ({"tool_choice": "always"}, "tool_choice", "'always'"),
    ({"tool_choice": {"type": "x"}}, "tool_choice.type", "'x'"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name", "missing"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any"}}},
        "tool_choice.allowed_tools.mode",
        "'any'",
    ),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "empty"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": HISTORY[1]["tool_calls"]}]},
        "messages.0.tool_calls",
        "assistant",
    ),
]


def with_parameters(parameters: Any, **more: Any) -> dict[str, Any]:
    named = {"name": "f", "parameters": parameters} | more
    return {"tools": [{"type": "function", "function": named}]}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD += [
    (with_parameters([1]), "tools.0.function.parameters", "list"),
    (with_parameters({"type": "string"}), "tools.0.function.parameters.type", "'string'"),
    (
        with_parameters({"type": ["array", "null"]}),
        "tools.0.function.parameters.type",
        "of type list: wanted object",
    ),
    (with_parameters(deep(40)), "tools.0.function.parameters", "64 levels"),
    (with_parameters({}, strict="yes"), "tools.0.function.strict", "'yes'"),
    (
        with_parameters({"type": "object", "not": {}}, strict=True),
        "tools.0.function.parameters",
        "#: ",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
async def test_bad_tools_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    edge = edge_that_says("x")
    named, message = await refused(edge, TOOLS | fields)
    assert named == param
    assert words in message
    assert not edge.generator.calls


@pytest.mark.parametrize("kinds", [["object", "null"], ["object"]])
@pytest.mark.parametrize("strict", [True, False])
async def test_parameters_that_may_be_null_are_an_object(kinds: list[str], *, strict: bool) -> None:
    """As schemas of optional values are written. A call has arguments in any case."""
    edge = edge_that_says("x")
    parameters = {"type": kinds, "properties": {"a": {"type": "string"}}}
    await post(edge, ASKED | with_parameters(parameters, strict=strict))
    grammar = edge.generator.calls[0].sampling.grammar
    assert grammar is not None
    assert '{"type": "object", "properties"' in grammar.text
    assert '"null"' not in grammar.text


@pytest.mark.parametrize("arguments", [5, [1], True])
async def test_arguments_in_the_history_are_objects(arguments: Any) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    history = [*ASKED["messages"], {"role": "assistant", "tool_calls": calls}]
    param, _ = await refused(edge_that_says("x"), {"messages": history})
    assert param == "messages.1.tool_calls.0.function.arguments"


def described(number: int, num_properties: int) -> dict[str, Any]:
    """A tool as MCP servers describe them: most of it is text."""
    text = {"title": "A title", "description": "What stands here, and when it is needed. " * 10}
    properties = {f"property_{i}": {"type": "string", **text} for i in range(num_properties)}
    schema = {"type": "object", "properties": properties, **text}
    return function(f"server_tool_{number}", parameters=schema)


async def test_tools_of_several_servers_and_a_format_are_one_request() -> None:
    edge = edge_that_says("Hello")
    tools = [described(number, 2) for number in range(MOST_TOOLS)]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    short = {"truncate_prompt_tokens": 9}
    await post(edge, ASKED | {"tools": tools, "response_format": form, **short})
    (call,) = edge.generator.calls
    assert call.sampling.grammar is not None
    assert f"server_tool_{MOST_TOOLS - 1}" in call.sampling.grammar.text
    assert "when it is needed" not in call.sampling.grammar.text


async def test_schemas_of_tools_that_are_too_large_together_are_told_so() -> None:
    tools = [described(number, 60) for number in range(MOST_TOOLS)]
    short = {"truncate_prompt_tokens": 9}
    param, message = await refused(edge_that_says(""), ASKED | {"tools": tools, **short})
    assert param == "tools"
    assert message.startswith(f"the schemas of {MOST_TOOLS} tools make a grammar of ")
    assert f"wanted at most {MAX_GRAMMAR_BYTES}, so fewer tools or smaller schemas" in message
