"""Values that other servers take, and languages that write the same value in another way."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from common.grammar import Grammar
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import Call, says
from tests.support.http.tool_models import hermes_model

CHATS, TEXTS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [USER], "seed": 7},
    TEXTS: {"prompt": "Hi", "seed": 7},
    RESPONSES: {"input": "Hi", "seed": 7},
    MESSAGES: {"messages": [USER], "max_tokens": 9, "seed": 7},
}
LIMITS = {
    CHATS: "max_completion_tokens",
    TEXTS: "max_tokens",
    RESPONSES: "max_output_tokens",
    MESSAGES: "max_tokens",
}
EVERY_ENDPOINT = pytest.mark.parametrize("path", BODIES)


async def answered(path: str, status: int = 200, **fields: Any) -> tuple[Any, list[Call]]:
    edge = make_edge(says("Hello"), model=hermes_model(), strict_fields=True)
    async with edge.client() as client:
        reply = await client.post(path, json=BODIES[path] | fields)
    assert reply.status_code == status, reply.text
    return reply.json(), edge.generator.calls


async def call_of(path: str, **fields: Any) -> Call:
    _, (call,) = await answered(path, **fields)
    return call


async def same_as_without(path: str, field: str, value: Any) -> None:
    plain, call = await call_of(path), await call_of(path, **{field: value})
    assert (call.prompt_token_ids, call.sampling) == (plain.prompt_token_ids, plain.sampling)


# --- -1, where there is none ----------------------------------------------------------------------


@pytest.mark.covers("K10")
@EVERY_ENDPOINT
async def test_a_seed_of_minus_one_is_drawn(path: str) -> None:
    seeds = {(await call_of(path, seed=-1)).sampling.seed for _ in range(3)}
    assert len(seeds) == 3
    assert (await call_of(path, seed=-2)).sampling.seed == 2**64 - 2


@pytest.mark.covers("K10")
@EVERY_ENDPOINT
async def test_a_limit_of_minus_one_is_all_that_the_context_leaves(path: str) -> None:
    call = await call_of(path, **{LIMITS[path]: -1})
    free = await call_of(CHATS)
    room = free.sampling.max_tokens + len(free.prompt_token_ids)
    assert call.sampling.max_tokens == room - len(call.prompt_token_ids)
    assert call.is_cut_to_fit
    await answered(path, 400, **{LIMITS[path]: -2})


# --- whole numbers --------------------------------------------------------------------------------

WHOLE = ("seed", "top_k", "priority", "min_tokens", "truncate_prompt_tokens")


@pytest.mark.covers("K11")
@EVERY_ENDPOINT
async def test_a_whole_number_may_have_a_fraction_of_zero(path: str) -> None:
    for field in (*WHOLE, LIMITS[path]):
        whole, call = await call_of(path, **{field: 5}), await call_of(path, **{field: 5.0})
        assert call.sampling == whole.sampling
        assert (call.priority, call.prompt_token_ids) == (whole.priority, whole.prompt_token_ids)
        await answered(path, 400, **{field: 5.5})
        await answered(path, 400, **{field: "5"})
    for other in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        assert (await call_of(path, **{other: 9.0})).sampling.max_tokens == 9


@pytest.mark.covers("K11")
@pytest.mark.parametrize("path", [CHATS, TEXTS])
async def test_numbers_of_choices_and_alternatives_may_have_one_too(path: str) -> None:
    fields: dict[str, Any] = {"n": 2.0, "logprobs": 1.0 if path == TEXTS else True}
    answer, calls = await answered(path, **fields)
    assert len(calls) == len(answer["choices"]) == 2
    if path == TEXTS:
        await answered(path, best_of=2.0, prompt_logprobs=1.0)
    else:
        await answered(path, logprobs=True, top_logprobs=2.0)


@pytest.mark.covers("K11")
async def test_a_number_that_no_float_holds_exactly_is_no_whole_one() -> None:
    assert (await call_of(CHATS, seed=2.0**53)).sampling.seed == 2**53
    await answered(CHATS, 400, seed=2.0**54)


# --- empty lists, as PHP writes objects without fields --------------------------------------------

OBJECTS: list[tuple[str, str]] = [
    *((path, field) for path in (CHATS, TEXTS) for field in ("logit_bias", "stream_options")),
    *((path, "response_format") for path in (CHATS, TEXTS)),
    *((CHATS, field) for field in ("chat_template_kwargs", "tool_choice", "metadata")),
    *((RESPONSES, field) for field in ("text", "reasoning", "stream_options", "metadata")),
    *((MESSAGES, field) for field in ("tool_choice", "thinking", "output_config", "metadata")),
    *((MESSAGES, field) for field in ("context_management", "system")),
]


@pytest.mark.covers("K12")
@pytest.mark.parametrize(("path", "field"), OBJECTS)
async def test_an_empty_list_in_the_place_of_an_object_asks_for_nothing(
    path: str, field: str
) -> None:
    await same_as_without(path, field, [])
    if field not in ("metadata", "context_management"):  # which are not read
        await answered(path, 400, **{field: [1]})


@pytest.mark.covers("K12")
async def test_an_answer_repeats_an_object_for_an_empty_list() -> None:
    lists: dict[str, Any] = {"metadata": [], "text": [], "reasoning": [], "tool_choice": []}
    answer, _ = await answered(RESPONSES, **lists)
    plain, _ = await answered(RESPONSES)
    assert {name: answer[name] for name in lists} == {name: plain[name] for name in lists}


@pytest.mark.covers("K12")
async def test_parameters_and_arguments_may_be_empty_lists() -> None:
    named: dict[str, Any] = {"name": "now"}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": []}}
    chat = await call_of(
        CHATS,
        tools=[{"type": "function", "function": named | {"parameters": []}}],
        messages=[
            USER,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
        ],
    )
    used = {"type": "tool_use", "id": "1", "name": "now", "input": []}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "noon"}
    message = await call_of(
        MESSAGES,
        tools=[named | {"input_schema": []}],
        messages=[
            USER,
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ],
    )
    response = await call_of(
        RESPONSES,
        tools=[{"type": "function", "parameters": []} | named],
        input=[
            USER,
            {"type": "function_call", "call_id": "1", "name": "now", "arguments": []},
            {"type": "function_call_output", "call_id": "1", "output": "noon"},
        ],
    )
    prompt = hermes_model().decode(chat.prompt_token_ids)
    assert '{"name": "now", "arguments": {}}' in prompt
    assert message.prompt_token_ids == response.prompt_token_ids == chat.prompt_token_ids


@pytest.mark.covers("K12")
async def test_schemas_may_have_empty_lists_for_objects() -> None:
    def tool(properties: Any, inner: Any) -> dict[str, Any]:
        where = {"type": "object", "properties": properties}
        parameters = {"type": "object", "properties": {"where": where, "any": inner}}
        function = {"name": "now", "strict": True, "parameters": parameters}
        return {"type": "function", "function": function}

    lists = await call_of(CHATS, tools=[tool([], [])], tool_choice="required")
    objects = await call_of(CHATS, tools=[tool({}, {})], tool_choice="required")
    assert lists.prompt_token_ids == objects.prompt_token_ids
    assert lists.sampling.grammar == objects.sampling.grammar
    assert '"properties": {}' in hermes_model().decode(lists.prompt_token_ids)

    def form(schema: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    for name, empty, anything in (
        ("guided_json", [], {}),
        ("response_format", form([]), form({})),
    ):
        taken = await call_of(CHATS, **{name: empty})
        assert taken.sampling.grammar is not None
        assert taken.sampling.grammar == (await call_of(CHATS, **{name: anything})).sampling.grammar


# --- schemas --------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
AS_TEXT = json.dumps(SCHEMA, separators=(",", ":"))


async def grammar_of(path: str, form: dict[str, Any]) -> Grammar | None:
    fields: dict[str, Any] = {"text": {"format": form}}
    call = await call_of(path, **(fields if path == RESPONSES else {"response_format": form}))
    return call.sampling.grammar


@pytest.mark.covers("K13")
@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@pytest.mark.parametrize(
    ("path", "told"),
    [
        *((path, {"schema": SCHEMA}) for path in (CHATS, TEXTS, RESPONSES)),
        *((path, {"schema": AS_TEXT}) for path in (CHATS, TEXTS, RESPONSES)),
        *((path, {"json_schema": {"schema": SCHEMA}}) for path in (CHATS, TEXTS)),
    ],
)
async def test_a_schema_is_enforced_beside_either_type(
    path: str, kind: str, told: dict[str, Any]
) -> None:
    asked = {"schema": SCHEMA} if path == RESPONSES else {"json_schema": {"schema": SCHEMA}}
    wanted = await grammar_of(path, {"type": "json_schema", **asked})
    assert wanted is not None
    assert await grammar_of(path, {"type": kind, **told}) == wanted
    assert await grammar_of(path, {"type": "json_object"}) != wanted


@pytest.mark.covers("K13")
async def test_without_a_schema_any_object_is_asked_for() -> None:
    plain = await grammar_of(CHATS, {"type": "json_object"})
    assert plain is not None
    nothings: list[Any] = [None, {}]
    form: dict[str, Any]
    for name, nothing in itertools.product(("schema", "json_schema"), nothings):
        form = {"type": "json_object", name: nothing}
        assert await grammar_of(CHATS, form) == plain
    for form in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        await answered(CHATS, 400, response_format=form)
    both = {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": SCHEMA}}
    error, _ = await answered(CHATS, 400, response_format=both)
    assert error["error"]["param"] == "response_format.schema"
    error, _ = await answered(CHATS, 400, response_format={"type": "json_object", "schema": 5})
    assert error["error"]["param"] == "response_format.schema"
    error, _ = await answered(RESPONSES, 400, text={"format": {"type": "json_object", "schema": 5}})
    assert error["error"]["param"] == "text.format.schema"


# --- options of a stream --------------------------------------------------------------------------


@pytest.mark.covers("W10")
@pytest.mark.parametrize("path", [CHATS, TEXTS])
@pytest.mark.parametrize("stream", [None, False])
@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": False}])
async def test_options_of_a_stream_ask_a_whole_answer_for_nothing(
    path: str, stream: bool | None, options: dict[str, Any]
) -> None:
    answer, _ = await answered(path, stream=stream, stream_options=options)
    plain, _ = await answered(path)
    assert answer["usage"] == plain["usage"]
