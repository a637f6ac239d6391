"""What is wrong is refused at once, in OpenAI's shape, with the field's name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import InvalidRequest
from router.core.generation import TokenChunk
from tests.support.http.edge_model import CONTEXT, tiny_model
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import Call, chunks

USER = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": USER}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
VOCAB = tiny_model().vocab_size


async def refused(edge: Edge, path: str, body: bytes, **headers: str) -> tuple[int, Any, Any]:
    """Status, error object and headers; checks the shape and that no generator was called."""
    async with edge.client() as client:
        response = await client.post(path, content=body, headers=headers)
    answer = response.json()
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert edge.generator.calls == []
    assert edge.metric("pdserve_requests_in_progress") == 0
    return response.status_code, answer["error"], response.headers


REFUSAL: dict[str, Any] = {"type": "refusal", "refusal": "No."}
LONGEST = int("9" * 4300)
"""The largest number that JSON may have here; Python writes none that is longer."""


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"} | fields]}


BOTH: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": 5}, "model", "valid string"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": -1}, "temperature", "wanted 0 to 100"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": -0.1}, "top_p", "0 to 1"),
    ({"top_p": 1.5}, "top_p", "0 to 1"),
    ({"top_k": -2}, "top_k", "wanted -1 or more"),
    ({"min_p": 2}, "min_p", "0 to 1"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty", "0.01 to 10"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -5}, "max_tokens", "at least 1"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"min_tokens": -1}, "min_tokens", "0 to "),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "0 to 8, max_tokens"),
    ({"min_tokens": CONTEXT}, "min_tokens", "are left"),
    ({"min_tokens": 10**30}, "min_tokens", "are left"),
    ({"min_tokens": 1.5}, "min_tokens", "valid integer"),
    ({"seed": 2**64}, "seed", "-2^63 to 2^64 - 1"),
    ({"seed": -(2**63) - 1}, "seed", "-2^63 to 2^64 - 1"),
    ({"priority": 1001}, "priority", "wanted -1000 to 1000"),
    ({"priority": -1001}, "priority", "wanted -1000 to 1000"),
    ({"priority": 0.5}, "priority", "valid integer"),
    ({"priority": "high"}, "priority", "valid integer"),
    ({"n": 0}, "n", "1 to 128"),
    ({"n": -1}, "n", "1 to 128"),
    ({"n": 129}, "n", "1 to 128"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": "x" * 1025}, "stop", "too long"),
    ({"stop": ["a", 5]}, "stop", "list of texts"),
    ({"stop": 5}, "stop", "list of texts"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", f"0 to {VOCAB - 1}"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "token id -1"),
    ({"stop_token_ids": [5] * 65}, "stop_token_ids", "at most 64"),
    ({"stop_token_ids": 5}, "stop_token_ids", "valid array"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"hello": 1}}, "logit_bias", "a token id, 0 to"),
    ({"logit_bias": {"100000": 1}}, "logit_bias", "a token id, 0 to"),
    ({"logit_bias": [1]}, "logit_bias", "should be an object"),
    ({"bad_words": [""]}, "bad_words", "1 to 128 characters"),
    ({"bad_words": ["x"] * 65}, "bad_words", "at most 64"),
    ({"bad_words": "x"}, "bad_words", "valid array"),
    ({"allowed_token_ids": [100_000]}, "allowed_token_ids", "ids 0 to"),
    ({"allowed_token_ids": ["x"]}, "allowed_token_ids.0", "valid integer"),
    ({"cache_salt": "x" * 257}, "cache_salt", "at most 256"),
    ({"guided_json": 5}, "guided_json", "wanted a JSON schema"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": "[1]"}, "guided_json", "wanted an object or true"),
    ({"guided_json": '"\\ud800"'}, "guided_json", "wanted an object or true"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "#: Unimplemented"),
    ({"guided_json": {"$ref": "#/a"}}, "guided_json", "does not exist"),
    ({"guided_json": "x" * (1 << 18 | 1)}, "guided_json", "wanted 1 to 262144"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_regex": ["a"]}, "guided_regex", "wanted text"),
    ({"guided_regex": ""}, "guided_regex", "has 0 bytes"),
    ({"guided_choice": []}, "guided_choice", "no texts"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "an empty text"),
    ({"guided_choice": "a"}, "guided_choice", "a list of texts"),
    ({"guided_choice": ["a", 1]}, "guided_choice.1", "of type int: wanted a text"),
    ({"structured_outputs": {"choice": [1.5]}}, "structured_outputs.choice.0", "of type float"),
    ({"structured_outputs": {"choice": [None]}}, "structured_outputs.choice.0", "missing"),
    ({"guided_grammar": "start: other"}, "guided_grammar", "other"),
    ({"guided_grammar": "root ::= (\n"}, "guided_grammar", "no grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "wanted false"),
    ({"structured_outputs": {}}, "structured_outputs", "has nothing"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "not supported",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        "not supported",
    ),
    ({"structured_outputs": "json"}, "structured_outputs", "wanted an object"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
]
CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": {}}, "messages", "valid"),
    ({"messages": None}, "messages", "valid"),
    ({"messages": ["Hi"]}, "messages.0", "object"),
    (message(role="boss"), "messages.0.role", "'user'"),
    (message(role="robot"), "messages.0.role", "'user'"),
    (message(content=5), "messages.0.content", "text or a list"),
    (message(content=None), "messages.0.content", "missing"),
    (message(content=[5]), "messages.0.content.0", "content part"),
    (message(content=[{"type": "text"}]), "messages.0.content.0.text", "not text"),
    (
        message(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages.0.content.0.type",
        "image_url",
    ),
    (message(content=[REFUSAL]), "messages.0.content.0.type", "'refusal'"),
    (
        message(role="assistant", content=[REFUSAL | {"refusal": None}]),
        "messages.0.content.0.refusal",
        "not text",
    ),
    (message(tool_calls=[{"id": "1"}]), "messages.0.tool_calls.0.function", "missing"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "wanted an object with a schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "is missing",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "is 'xml'"),
    ({"response_format": "json"}, "response_format", "wanted an object with a type"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"properties": {"a/b": {"items": {"not": {}}}}}},
            }
        },
        "response_format.json_schema.schema",
        "#/properties/a~1b/items: Unimplemented keys",
    ),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"audio": {}}, "audio", "not supported"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "0 to 20"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"reasoning_effort": 5}, "reasoning_effort", "valid string"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort", "is 5: wanted text"),
    ({"reasoning": {"enabled": "no"}}, "reasoning.enabled", "is no: wanted true or false"),
    ({"reasoning": {"exclude": "yes"}}, "reasoning.exclude", "true or false"),
    ({"include_reasoning": "maybe"}, "include_reasoning", "boolean"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "not supported"),
    ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a", "text, a number"),
    ({"chat_template_kwargs": {"a": "x" * 257}}, "chat_template_kwargs", "at most 256"),
    (
        {"chat_template_kwargs": {"enable_thinking": "False"}},
        "chat_template_kwargs.enable_thinking",
        "is the text 'False': wanted true or false, without quotes",
    ),
    ({"chat_template_kwargs": {"x" * 257: 1}}, "chat_template_kwargs", "at most 256"),
    ({"reasoning_effort": "x" * 257}, "chat_template_kwargs", "at most 256"),
    (
        {"chat_template_kwargs": {str(i): i for i in range(33)}},
        "chat_template_kwargs",
        "at most 32",
    ),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "object"),
    ({"continue_final_message": True}, "continue_final_message", "role is user"),
    (
        {
            "messages": [{"role": "assistant", "content": "So"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
        "both true",
    ),
]
TEXTS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [""]}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": None}, "prompt", "text or a list"),
    ({"prompt": 5}, "prompt", "text or a list"),
    ({"prompt": [5, "a"]}, "prompt", "str among token ids"),
    ({"prompt": ["a", 5]}, "prompt", "str among token ids"),
    ({"prompt": [[5], [True]]}, "prompt", "bool among token ids"),
    ({"prompt": [1.5]}, "prompt", "float among token ids"),
    ({"prompt": [VOCAB]}, "prompt", f"token id {VOCAB}"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [10**4000]}, "prompt", "token id 1"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ({"prompt": ["a"] * 65, "n": 2}, "n", "128 choices"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"logprobs": 20, "n": 128, "max_tokens": LONGEST}, "max_tokens", "max_tokens is 999"),
    ({"logprobs": 20, "echo": True, "prompt": ["a" * 20000] * 9}, "prompt", "256 tokens"),
    ({"best_of": 2, "n": 3}, "best_of", "n or more"),
    ({"best_of": 129}, "best_of", "at most 128 choices"),
    ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    ({"suffix": "x"}, "suffix", "not supported"),
]
CASES = [
    *((CHAT_PATH, CHAT | fields, param, words) for fields, param, words in BOTH + CHATS),
    *((TEXT_PATH, TEXT | fields, param, words) for fields, param, words in BOTH + TEXTS),
]


@pytest.mark.covers("T39")
@pytest.mark.parametrize(("path", "body", "param", "words"), CASES)
async def test_a_bad_field_is_named(path: str, body: Any, param: str, words: str) -> None:
    status, error, _ = await refused(make_edge(), path, json.dumps(body).encode())
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]
    assert len(error["message"]) <= 1000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"model": "\xff"}', "not in UTF-8: byte 0xff at 11"),
        (b'{"model": "\\ud800"', "not valid JSON"),
        (b'{"model": ' + b"[" * 30_000, "recursion"),
        (b'{"model": ' + b"[" * 100_000, "100001 objects and lists: wanted at most 32768"),
        (b'{"n": ' + b"1" * 10_000 + b"}", "out of range"),
        (b'{"model": "tiny", "prompt": "Hi", "top_p": NaN}', "top_p is not a finite"),
        (b'{"model": "tiny", "prompt": "Hi", "top_p": 1e999}', "top_p is not a finite"),
        (b'{"model": "tiny"}', "prompt is missing"),
    ],
)
async def test_a_body_that_is_no_request(body: bytes, words: str) -> None:
    status, error, _ = await refused(make_edge(), TEXT_PATH, body)
    assert status == 400
    assert words in error["message"]


@pytest.mark.parametrize("num_tokens", [CONTEXT, CONTEXT + 50])
async def test_a_prompt_without_room_names_both_numbers(num_tokens: int) -> None:
    body = TEXT | {"prompt": [5] * num_tokens}
    status, error, _ = await refused(make_edge(), TEXT_PATH, json.dumps(body).encode())
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert str(num_tokens) in error["message"]
    assert str(CONTEXT) in error["message"]


async def test_nodes_with_less_room_than_the_model_set_the_limit() -> None:
    edge = make_edge()
    edge.cluster.longest = 100
    status, error, _ = await refused(
        edge, TEXT_PATH, json.dumps(TEXT | {"prompt": [5] * 100}).encode()
    )
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 100 tokens" in error["message"]
    assert str(CONTEXT) not in error["message"]
    status, error, _ = await refused(
        edge, TEXT_PATH, json.dumps(TEXT | {"prompt": "qz " * 10_000}).encode()
    )
    assert "maximum context length is 100 tokens" in error["message"]
    asked = TEXT | {"prompt": [5] * 60, "max_tokens": 50, "min_tokens": 41}
    status, error, _ = await refused(edge, TEXT_PATH, json.dumps(asked).encode())
    for number in ("41", "60", "100", "at most 40"):
        assert number in error["message"]


@pytest.mark.parametrize(
    ("longest", "limit"), [(None, CONTEXT), (100, 100), (CONTEXT + 1, CONTEXT)]
)
async def test_a_chat_without_max_tokens_gets_the_room_that_nodes_have(
    longest: int | None, limit: int
) -> None:
    edge = make_edge()
    edge.cluster.longest = longest
    async with edge.client() as client:
        response = await client.post(CHAT_PATH, json=CHAT)
        (card,) = (await client.get("/v1/models")).json()["data"]
    assert response.status_code == 200
    (call,) = edge.generator.calls
    assert len(call.prompt_token_ids) + call.sampling.max_tokens == limit
    assert card["max_model_len"] == limit


def edge_whose_node_comes(earlier: int | None) -> Edge:
    """A node that holds 100 tokens comes while a request waits. There is none before (None), or
    one that holds more."""

    async def script(call: Call) -> AsyncIterator[TokenChunk]:
        edge.cluster.longest = 100
        if len(call.prompt_token_ids) + call.sampling.max_tokens > 100:
            raise InvalidRequest("wanted less", param="max_tokens")
        for chunk in chunks([5]):
            yield chunk

    edge = make_edge(script)
    edge.cluster.longest = earlier
    return edge


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("earlier", "planned_for"), [(None, CONTEXT), (200, 200)])
async def test_a_chat_that_waits_for_a_node_gets_the_room_that_the_node_has(
    is_stream: bool, earlier: int | None, planned_for: int
) -> None:
    edge = edge_whose_node_comes(earlier)
    async with edge.client() as client:
        response = await client.post(CHAT_PATH, json=CHAT | {"stream": is_stream})
    assert response.status_code == 200
    refused_call, call = edge.generator.calls
    assert len(refused_call.prompt_token_ids) + refused_call.sampling.max_tokens == planned_for
    assert len(call.prompt_token_ids) + call.sampling.max_tokens == 100


async def test_what_a_node_that_comes_cannot_hold_is_refused_by_its_own_name() -> None:
    body = {"input": "qz", "max_output_tokens": 200, "min_tokens": 100}
    edge = edge_whose_node_comes(None)
    async with edge.client() as client:
        response = await client.post("/v1/responses", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "min_tokens"


async def test_a_chat_that_is_too_long() -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "qz " * CONTEXT}]}
    status, error, _ = await refused(make_edge(), CHAT_PATH, json.dumps(body).encode())
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


async def test_a_huge_text_is_refused_by_its_beginning() -> None:
    body = TEXT | {"prompt": "qz " * 1_000_000}
    status, error, _ = await refused(make_edge(), TEXT_PATH, json.dumps(body).encode())
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "3000000 characters" in error["message"]


async def test_prompt_and_max_tokens_together() -> None:
    edge = make_edge()
    body = TEXT | {"prompt": [[5] * 200, [5] * 210], "max_tokens": 56}
    for limit, most in ((57, [56, 46]), (56, [56, 46]), (50, [50, 46]), (46, [46, 46])):
        async with edge.client() as client:
            response = await client.post(TEXT_PATH, json=body | {"max_tokens": limit})
        assert response.status_code == 200
        assert [call.sampling.max_tokens for call in edge.generator.calls[-2:]] == most


async def test_an_unknown_model() -> None:
    body = TEXT | {"model": "gpt-4"}
    status, error, _ = await refused(make_edge(), TEXT_PATH, json.dumps(body).encode())
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'gpt-4'" in error["message"]
    assert "'tiny'" in error["message"]


@pytest.mark.parametrize("length", ["2049", "9" * 5000])
async def test_a_body_too_large_is_refused_by_its_length_unread(length: str) -> None:
    num_sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_sent
        num_sent += 1
        yield b"{}"

    async with make_edge(max_body=2048).client() as client:
        response = await client.post(TEXT_PATH, content=body(), headers={"content-length": length})
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["code"] == "body_too_large"
    assert "2048" in error["message"]
    assert num_sent == 0


async def test_a_chunked_body_too_large_is_not_read_to_its_end() -> None:
    edge = make_edge(max_body=2048)
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b"x" * 1024

    async with edge.client() as client:
        response = await client.post(TEXT_PATH, content=endless())
    assert response.status_code == 413
    assert num_sent == 3


async def test_a_body_of_the_largest_size_is_served() -> None:
    body = json.dumps(TEXT).encode().ljust(2048)
    async with make_edge(max_body=2048).client() as client:
        assert (await client.post(TEXT_PATH, content=body)).status_code == 200
        assert (await client.post(TEXT_PATH, content=body + b" ")).status_code == 413


async def test_a_length_that_is_no_number() -> None:
    headers = {"content-length": "-5"}
    status, error, _ = await refused(make_edge(), TEXT_PATH, b"{}", **headers)
    assert status == 400
    assert "Content-Length" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
async def test_wrong_paths_and_methods(method: str, path: str, status: int, code: str) -> None:
    async with make_edge().client() as client:
        response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_outcomes_are_counted_by_code() -> None:
    edge = make_edge()
    await refused(edge, TEXT_PATH, b"{}")
    outcome = {"endpoint": "completions", "outcome": "invalid_request"}
    assert edge.metric("pdserve_requests_total", **outcome) == 1


@pytest.mark.covers("J29")
@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "zstd, gzip"])
async def test_a_compressed_body_is_named(encoding: str) -> None:
    headers = {"content-encoding": encoding}
    status, error, _ = await refused(make_edge(), TEXT_PATH, b"\x1f\x8b", **headers)
    assert status == 400
    assert error["message"] == (
        f"the body's Content-Encoding is {encoding!r}: wanted plain JSON (of Codex: "
        "features.enable_request_compression = false)"
    )


async def test_a_body_that_says_that_it_is_not_compressed() -> None:
    async with make_edge().client() as client:
        headers = {"content-encoding": "identity"}
        assert (await client.post(TEXT_PATH, json=TEXT, headers=headers)).status_code == 200
