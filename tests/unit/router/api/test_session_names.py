"""What names the session of a request, which name wins, and whose the name is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from router.access.api_key_book import ApiKeyBook
from router.access.api_keys import add_api_key
from router.api.sessions import SESSION_HEADERS, session_id
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import says

USER = [{"role": "user", "content": "Hello world"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hello world"},
    "/v1/responses": {"input": "Hello world"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
CHAT = "/v1/chat/completions"
HEADERS = [name.decode() for name in SESSION_HEADERS]


async def session_of(edge: Edge, path: str = CHAT, headers: Any = None, **fields: Any) -> bytes:
    """Under what the nodes of this request's session are remembered."""
    async with edge.client() as client:
        answer = await client.post(path, json=BODIES[path] | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return edge.generator.calls[-1].session


def of(name: str, owner: str = "") -> bytes:
    return session_id(owner, name.encode(), "")


@pytest.fixture
def edge() -> Edge:
    return make_edge(says("Hello"), strict_fields=True)


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_without_a_name_has_no_session(edge: Edge, path: str) -> None:
    assert await session_of(edge, path) == b""
    assert await session_of(edge, path, user=None, prompt_cache_key="") == b""
    assert await session_of(edge, path, headers={"x-session-id": ""}) == b""


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_takes_every_name(edge: Edge, path: str) -> None:
    for field in ("prompt_cache_key", "user"):
        assert await session_of(edge, path, **{field: "a chat"}) == of("a chat")
    for header in HEADERS:
        assert await session_of(edge, path, {header: "a-chat"}) == of("a-chat")


@pytest.mark.parametrize("second", range(1, len(HEADERS)))
async def test_of_two_headers_the_first_of_the_list_wins(edge: Edge, second: int) -> None:
    """Wherever it stands among the headers of the request."""
    for first in range(second):
        one, two = (HEADERS[first], "one"), (HEADERS[second], "two")
        for order in ((one, two), (two, one)):
            assert await session_of(edge, headers=dict(order), user="three") == of("one")


async def test_a_header_wins_over_the_body_and_the_key_of_the_cache_over_the_user(
    edge: Edge,
) -> None:
    both = {"prompt_cache_key": "key", "user": "user"}
    assert await session_of(edge, **both) == of("key")
    assert await session_of(edge, headers={HEADERS[-1]: "head"}, **both) == of("head")


async def test_the_user_of_a_message_is_in_its_metadata(edge: Edge) -> None:
    path = "/v1/messages"
    metadata = {"user_id": "u", "other": 5}
    assert await session_of(edge, path, metadata=metadata) == of("u")
    assert await session_of(edge, path, metadata=metadata, prompt_cache_key="key") == of("key")
    for nothing in ({}, None, {"user_id": None}, {"user_id": ""}, "text", [5]):
        assert await session_of(edge, path, metadata=nothing) == b""


@pytest.mark.parametrize(
    ("user_id", "text"), [(5, "is not text"), ("x" * 257, "has 257 characters: wanted at most 256")]
)
async def test_a_wrong_user_of_a_message_is_refused_where_it_stands(
    edge: Edge, user_id: Any, text: str
) -> None:
    body = BODIES["/v1/messages"] | {"metadata": {"user_id": user_id}}
    async with edge.client() as client:
        answer = await client.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert f"metadata.user_id {text}" in answer.json()["error"]["message"]
    assert not edge.generator.calls


async def test_a_name_may_be_of_256_characters_of_any_script(edge: Edge) -> None:
    longest = "é\x00漢\n" * 64
    assert await session_of(edge, user=longest) == session_id("", b"", longest) != b""
    assert await session_of(edge, headers={"x-session-id": "x" * 256}) == of("x" * 256)


@pytest.mark.parametrize("value", [b"x" * 257, "é".encode(), b"two words", b"\xff"])
async def test_a_header_that_is_no_name_is_ignored_with_one_warning(
    edge: Edge, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        assert await session_of(edge, headers={b"x-session-id": value}, user="u") == of("u")
    warnings = [one.getMessage() for one in caplog.records if "x-session-id" in one.getMessage()]
    assert len(warnings) == 1
    assert f"of {len(value)} bytes" in warnings[0]
    assert value.decode("latin-1") not in warnings[0]
    other = {b"x-session-id": value, b"session_id": b"b", b"session-id": b"a"}
    assert await session_of(edge, headers=other) == of("a")


async def test_a_name_is_not_logged(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await session_of(edge, headers={"x-session-id": "my-own-name"}, user="my-other-name")
    assert "my-own-name" not in caplog.text
    assert "my-other-name" not in caplog.text


async def test_two_keys_with_one_name_have_two_sessions(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = {name: add_api_key(path, name) for name in ("a", "b")}
    edge = make_edge(says("Hello"), keys=ApiKeyBook(ManualClock(), path=path))
    found = {
        name: await session_of(edge, headers={"authorization": f"Bearer {key}", "session-id": "s"})
        for name, key in keys.items()
    }
    assert found == {"a": of("s", "a"), "b": of("s", "b")}
    assert found["a"] != found["b"]


def test_an_owner_and_a_name_are_not_mistaken_for_others() -> None:
    parts = ["", "a", "ab", "b", "1:a", ":", "1", "\x00"]
    ids = {session_id(owner, b"", name) for owner in parts for name in parts if name}
    assert len(ids) == len(parts) * (len(parts) - 1)
    assert {len(one) for one in ids} == {16}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_all_choices_of_a_request_are_of_its_session(edge: Edge, path: str) -> None:
    await session_of(edge, path, n=3, user="u")
    assert [call.session for call in edge.generator.calls] == [of("u")] * 3
