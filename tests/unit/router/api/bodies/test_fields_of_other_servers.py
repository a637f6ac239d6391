"""Fields that clients of other servers send: unknown ones, and those with a value for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.bodies.unknown_fields import MAX_FIELD_CHARS, MAX_IGNORED
from tests.support.http.http_edge import Edge, make_edge

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT_PATH: {"messages": [USER]}, TEXT_PATH: {"prompt": "Hi"}}
PATHS = list(BODIES)

FOR_NOTHING: dict[str, Any] = {
    "logit_bias": {},
    "bad_words": [],
    "allowed_token_ids": None,
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "prompt_logprobs": None,
    "structured_outputs": None,
    "guided_json": None,
    "regex": None,
    "cache_salt": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "truncate_prompt_tokens": None,
    "response_format": {"type": "text"},
    "stream_options": None,
    "request_id": "mine",
    "stop_regex": None,
    "custom_logit_processor": None,
    "logits_processors": [],
}
REFUSED: list[tuple[str, str, Any]] = [
    *((path, "stop_regex", value) for path in PATHS for value in ("a+", ["a+"])),
    *((path, "custom_logit_processor", value) for path in PATHS for value in ("{}", ["{}"])),
    *((path, "logits_processors", ["module.Processor"]) for path in PATHS),
    (CHAT_PATH, "separate_reasoning", False),
]


async def status_of(edge: Edge, path: str, **fields: Any) -> tuple[int, str | None]:
    async with edge.client() as client:
        reply = await client.post(path, json=BODIES[path] | fields)
    return reply.status_code, reply.json().get("error", {}).get("param")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("path", PATHS)
async def test_values_that_ask_for_nothing_are_no_news(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await status_of(make_edge(strict_fields=True), path, **FOR_NOTHING) == (200, None)
    assert warnings(caplog) == []


@pytest.mark.parametrize("value", [True, None])
async def test_reasoning_is_always_shown_apart(
    value: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"include_reasoning": value, "separate_reasoning": value}
    assert await status_of(make_edge(strict_fields=True), CHAT_PATH, **fields) == (200, None)
    assert warnings(caplog) == []


@pytest.mark.parametrize(("path", "name", "value"), REFUSED)
async def test_a_field_that_would_change_the_answer_is_refused(
    path: str, name: str, value: Any
) -> None:
    assert await status_of(make_edge(), path, **{name: value}) == (400, name)


@pytest.mark.covers("V03")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "value",
    [
        *({}, [], "", 0, False, "x", [{}]),
        {"do_remote_decode": True},
        {"do_remote_prefill": True, "remote_engine_id": None},
        {"remote_block_ids": [2**63], "remote_host": "10.0.0.1", "remote_port": 1},
    ],
)
async def test_transfer_parameters_of_a_client_are_refused_however_incomplete(
    path: str, value: Any
) -> None:
    edge = make_edge()
    assert await status_of(edge, path, kv_transfer_params=value) == (400, "kv_transfer_params")
    assert edge.generator.calls == []


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_without_a_model_is_for_the_one_that_is_served(path: str) -> None:
    edge = make_edge()
    assert await status_of(edge, path) == (200, None)
    assert await status_of(edge, path, model=None) == (200, None)
    assert await status_of(edge, path, model="other") == (404, "model")


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_field_is_ignored_and_logged_once(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    edge = make_edge()
    for _ in range(2):
        assert await status_of(edge, path, temprature=1, top_kk=[{}]) == (200, None)
    assert ["temprature" in text for text in warnings(caplog)] == [True, False]
    assert "'top_kk'" in warnings(caplog)[1]
    assert edge.generator.calls[0].sampling.temperature == 1.0


async def test_unknown_parts_of_options_and_messages_are_ignored_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    edge = make_edge()
    fields: dict[str, Any] = {
        "messages": [USER | {"id": "1"}, USER | {"id": "2", "refusal": None}],
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False, "more": 1},
    }
    async with edge.client() as client:
        reply = await client.post(CHAT_PATH, json=fields)
    assert reply.status_code == 200
    named = [text.split("'")[1] for text in warnings(caplog)]
    assert named == ["messages.id", "stream_options.more"]


@pytest.mark.parametrize("path", PATHS)
async def test_strict_fields_refuse_them_by_name(path: str) -> None:
    edge = make_edge(strict_fields=True)
    assert await status_of(edge, path, temprature=1) == (400, "temprature")
    options = {"stream": True, "stream_options": {"more": 1}}
    assert await status_of(edge, path, **options) == (400, "stream_options.more")
    assert edge.generator.calls == []


async def test_how_much_of_unknown_fields_is_kept_has_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    edge = make_edge()
    names = {f"{number:04}" + "x" * 1000: 1 for number in range(MAX_IGNORED + 5)}
    assert await status_of(edge, TEXT_PATH, **names) == (200, None)
    assert len(warnings(caplog)) == MAX_IGNORED
    assert max(len(text.split("'")[1]) for text in warnings(caplog)) == MAX_FIELD_CHARS
