"""What isolates, limits or names a request does so on every endpoint that generates."""

from __future__ import annotations

import re
from typing import Any

import pytest

from router.api.bodies.schemas import LIMITS
from tests.support.http.edge_model import CONTEXT
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import Call, says

USER = [{"role": "user", "content": "Hello world, the quick brown fox"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hello world, the quick brown fox"},
    "/v1/responses": {"input": "Hello world, the quick brown fox"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
OWN_LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
EVERY_ENDPOINT = pytest.mark.parametrize("path", BODIES)


async def ask(path: str, **fields: Any) -> tuple[int, Any, Edge]:
    edge = make_edge(says("Hello"), strict_fields=True, prefix_sharing="all")
    async with edge.client() as client:
        answer = await client.post(path, json=BODIES[path] | fields)
    return answer.status_code, answer.json(), edge


async def call_of(path: str, **fields: Any) -> Call:
    status, answer, edge = await ask(path, **fields)
    assert status == 200, answer
    (call,) = edge.generator.calls
    return call


@pytest.mark.covers("K04")
@EVERY_ENDPOINT
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", "tenant a"),
        ("cache_salt", ""),
        ("priority", 7),
        ("priority", -1000),
        ("min_tokens", 3),
        ("ignore_eos", True),
        ("stop_token_ids", [5, 6]),
        ("seed", 11),
        ("temperature", 0.5),
    ],
)
async def test_a_field_of_isolation_or_limits_is_served(path: str, field: str, value: Any) -> None:
    call = await call_of(path, **{field: value})
    given = getattr(call if field in ("cache_salt", "priority") else call.sampling, field)
    assert given == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.covers("K04")
@EVERY_ENDPOINT
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", "x" * 257),
        ("cache_salt", 5),
        ("cache_salt", ["a"]),
        ("prompt_cache_key", "x" * 257),
        ("prompt_cache_key", 5),
        ("user", "x" * 257),
        ("user", {"id": "a"}),
        ("priority", 1001),
        ("priority", "high"),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
        ("stop_token_ids", [10**6]),
        ("truncate_prompt_tokens", 0),
        ("max_output_tokens", 0),
        ("max_completion_tokens", "9"),
        ("max_tokens", True),
    ],
)
async def test_a_wrong_one_is_refused_by_its_name(path: str, field: str, value: Any) -> None:
    status, answer, edge = await ask(path, **{field: value})
    assert (status, edge.generator.calls) == (400, [])
    named = answer["error"].get("param") or answer["error"]["message"]
    assert field in named or (field in LIMITS and any(name in named for name in LIMITS))


@pytest.mark.covers("K04")
@EVERY_ENDPOINT
@pytest.mark.parametrize("name", LIMITS)
async def test_a_limit_is_one_under_each_of_its_names(path: str, name: str) -> None:
    if path == "/v1/messages" and name != "max_tokens":
        status, answer, _ = await ask(path, **{name: 8})
        assert status == 400
        assert f"{name} is 8 and max_tokens is 9: wanted one limit" in answer["error"]["message"]
        assert (await call_of(path, **{name: 9})).sampling.max_tokens == 9
        return
    assert (await call_of(path, **{name: 7})).sampling.max_tokens == 7
    assert (await call_of(path, **{name: 7, OWN_LIMITS[path]: 7})).sampling.max_tokens == 7
    if name not in ("max_tokens", OWN_LIMITS[path]) or path == "/v1/responses":
        status, answer, _ = await ask(path, **{OWN_LIMITS[path]: 8, name: 7})
        assert status == (200 if name == OWN_LIMITS[path] else 400), answer


@EVERY_ENDPOINT
async def test_only_an_answer_without_a_limit_of_the_clients_is_cut_to_fit(path: str) -> None:
    assert (await call_of(path)).is_cut_to_fit == ("max_tokens" not in BODIES[path])
    assert not (await call_of(path, **{OWN_LIMITS[path]: 9})).is_cut_to_fit


@EVERY_ENDPOINT
async def test_the_end_of_a_long_prompt_is_kept(path: str) -> None:
    whole = await call_of(path)
    cut = await call_of(path, truncate_prompt_tokens=4)
    assert cut.prompt_token_ids == whole.prompt_token_ids[-4:]


@EVERY_ENDPOINT
async def test_a_field_of_identity_changes_nothing_anywhere(path: str) -> None:
    plain, named = await call_of(path, seed=1), await call_of(path, seed=1, metadata={})
    assert (plain.prompt_token_ids, plain.sampling) == (named.prompt_token_ids, named.sampling)


@EVERY_ENDPOINT
@pytest.mark.parametrize("stream", [False, True])
async def test_the_id_and_the_time_of_a_request_hold_on_each(path: str, stream: bool) -> None:
    edge = make_edge(says("Hello"), request_timeout_s=70.0)
    headers = {"x-request-id": "of-the-client"}
    async with edge.client() as client:
        answer = await client.post(path, json=BODIES[path] | {"stream": stream}, headers=headers)
    assert answer.headers["x-request-id"] == "of-the-client"
    (call,) = edge.generator.calls
    assert 0 < call.deadline_s <= 70.0


@pytest.mark.covers("K05")
@EVERY_ENDPOINT
@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_top_p_0_is_the_likeliest_token(path: str, temperature: float) -> None:
    for value in (0, 0.0, -0.0):
        sampling = (await call_of(path, top_p=value, temperature=temperature, top_k=40)).sampling
        assert (sampling.top_k, sampling.top_p, sampling.temperature) == (1, 1.0, temperature)
    for value in (-0.1, 1.1):
        status, _, _ = await ask(path, top_p=value)
        assert status == 400


@EVERY_ENDPOINT
async def test_the_smallest_filters_are_taken(path: str) -> None:
    assert (await call_of(path, top_p=1e-320)).sampling.top_p == 1e-320
    assert (await call_of(path, top_k=0)).sampling.top_k == 0
    assert (await call_of(path, top_k=-1)).sampling.top_k == 0
    assert (await call_of(path, temperature=1e-300)).sampling.temperature == 1e-300


@pytest.mark.covers("J19")
@EVERY_ENDPOINT
@pytest.mark.parametrize("words", [300, 200_000])
async def test_a_prompt_that_is_too_long_has_the_words_that_agents_know(
    path: str, words: int
) -> None:
    """By them agents shorten a conversation and go on: by these two most, of some thirty."""
    text = "qz " * words
    prompt: dict[str, Any] = {"prompt": text} if "prompt" in BODIES[path] else {"input": text}
    if "messages" in BODIES[path]:
        prompt = {"messages": [{"role": "user", "content": text}]}
    status, answer, edge = await ask(path, **prompt)
    message = answer["error"]["message"]
    assert (status, edge.generator.calls) == (400, [])
    assert re.match(rf"prompt is too long: \d+ tokens > {CONTEXT - 1} maximum", message)
    assert f"maximum context length is {CONTEXT} tokens" in message
    assert path == "/v1/messages" or answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.covers("J18")
@EVERY_ENDPOINT
@pytest.mark.parametrize("limit", [CONTEXT, 65_536, 10**30])
async def test_a_limit_that_is_more_than_the_context_leaves_is_cut_to_that(
    path: str, limit: int
) -> None:
    """Agents send the same limit, 32,000 and more, with every conversation."""
    call = await call_of(path, **{OWN_LIMITS[path]: limit})
    assert call.sampling.max_tokens == CONTEXT - len(call.prompt_token_ids)
    assert call.is_cut_to_fit


async def test_of_two_prompts_the_one_that_is_too_long_for_the_limit_is_cut_to_fit() -> None:
    """Only that one goes on, after a loss, where no node is left that holds all of it."""
    long = list(range(1, CONTEXT - 4))
    status, answer, edge = await ask("/v1/completions", prompt=[[1, 2], long], max_tokens=9)
    assert status == 200, answer
    found = {len(one.prompt_token_ids): one for one in edge.generator.calls}
    limits = [(one.sampling.max_tokens, one.is_cut_to_fit) for _, one in sorted(found.items())]
    assert limits == [(9, False), (5, True)]


@pytest.mark.covers("J19")
@EVERY_ENDPOINT
async def test_a_least_that_does_not_fit_has_the_words_too(path: str) -> None:
    status, answer, edge = await ask(path, **{OWN_LIMITS[path]: 10**6, "min_tokens": CONTEXT})
    message = answer["error"]["message"]
    assert (status, edge.generator.calls) == (400, [])
    assert message.startswith(f"min_tokens is {CONTEXT} and the prompt has ")
    assert f"maximum context length is {CONTEXT} tokens" in message
    assert path == "/v1/messages" or answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.covers("J18")
async def test_log_probabilities_are_counted_with_what_the_context_leaves() -> None:
    chat = "/v1/chat/completions"
    call = await call_of(chat, max_tokens=10**9, logprobs=True, top_logprobs=20)
    assert call.sampling.max_tokens == CONTEXT - len(call.prompt_token_ids)
