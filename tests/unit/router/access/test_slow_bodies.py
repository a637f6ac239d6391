"""A seat is for a request that is there: bodies that do not come keep nobody out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Scope

from router.access import middleware
from router.access.api_key_book import ApiKeyBook
from router.access.api_keys import add_api_key
from router.access.arriving_bodies import MAX_BODIES, ArrivingBodies
from router.api.exchanges import ADMIN_SEATS
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.http_server import eventually, served
from tests.support.http.scripted_generator import hangs_after

PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
)
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}


class Keys:
    """A user whose key has limits, another one, and an administrator."""

    def __init__(self, folder: Path) -> None:
        file = folder / "api_keys.json"
        self.user = add_api_key(file, "user", max_concurrent=2)
        self.other = add_api_key(file, "other")
        self.admin = add_api_key(file, "admin", is_admin=True)
        self.book = ApiKeyBook(ManualClock(), path=file)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class SlowBody:
    """A request of which one byte has come; `statuses` is what it is answered."""

    def __init__(
        self, edge: Edge, key: str, path: str = "/v1/completions", address: str = "10.0.0.1"
    ) -> None:
        self.statuses: list[int] = []
        self.closes = False
        self._parts = [b"{"]
        self._more = asyncio.Event()
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "client": (address, 1),
            "root_path": "",
            "headers": [(b"authorization", b"Bearer " + key.encode())] if key else [],
        }
        self.task = asyncio.create_task(self._serve(edge, scope))

    async def _serve(self, edge: Edge, scope: Scope) -> None:
        await edge.app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._parts:
            self._more.clear()
            await self._more.wait()
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": part != b"}"}

    def give(self, *parts: bytes) -> None:
        """Let more of it come; it is whole with its brace."""
        self._parts += parts
        self._more.set()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
            self.closes = (b"connection", b"close") in message["headers"]

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def slow_bodies(edge: Edge, key: str, count: int) -> AsyncIterator[list[SlowBody]]:
    slow = [SlowBody(edge, key, PATHS[i % len(PATHS)]) for i in range(count)]
    for _ in range(5):
        await asyncio.sleep(0)
    try:
        yield slow
    finally:
        for one in slow:
            await one.leave()


async def status(edge: Edge, key: str) -> int:
    async with edge.client() as client:
        return (await client.post("/v1/completions", json=TEXT, headers=bearer(key))).status_code


async def test_they_hold_no_seat_of_a_key_and_none_of_the_router(keys: Keys) -> None:
    edge = make_edge(keys=keys.book, max_concurrent_requests=2)
    async with slow_bodies(edge, keys.user, 20):
        assert edge.metric("pdserve_requests_in_progress") == 0
        assert edge.metric("pdserve_api_key_requests_in_progress", key="user") == 0
        for key in (keys.user, keys.other, keys.admin):
            assert await status(edge, key) == 200
    assert edge.metric("pdserve_api_key_requests_total", key="user", outcome="accepted") == 1


async def test_they_hold_none_without_keys(keys: Keys) -> None:
    edge = make_edge(max_concurrent_requests=2)
    async with slow_bodies(edge, "", 20):
        assert await status(edge, "x") == 200


async def test_more_than_the_most_let_those_of_their_own_key_go(keys: Keys) -> None:
    edge = make_edge(keys=keys.book)
    async with (
        slow_bodies(edge, keys.other, 3) as others,
        slow_bodies(edge, keys.user, MAX_BODIES + 50) as slow,
    ):
        for key in (keys.user, keys.other, keys.admin):
            assert await status(edge, key) == 200
        await eventually(lambda: sum(bool(one.statuses) for one in slow) >= 53)
        gone = [one for one in slow if one.statuses]
        assert {tuple(one.statuses) for one in gone} == {(408,)}
        assert all(one.closes for one in gone)
        assert not any(one.statuses for one in others)
        assert len(gone) < 60


async def test_without_keys_those_of_their_own_address_go() -> None:
    edge = make_edge()
    other = SlowBody(edge, "", address="10.0.0.2")
    async with slow_bodies(edge, "", MAX_BODIES + 9) as slow:
        await eventually(lambda: sum(bool(one.statuses) for one in slow) == 10)
        assert other.statuses == []
    await other.leave()


async def test_a_key_at_its_limit_is_refused_before_its_body_is_read(keys: Keys) -> None:
    edge = make_edge(hangs_after(), keys=keys.book)
    running = [asyncio.create_task(status(edge, keys.user)) for _ in range(2)]
    await eventually(lambda: len(edge.generator.calls) == 2)
    async with slow_bodies(edge, keys.user, 1) as (slow,):
        assert slow.statuses == [429]
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_bodies_that_all_become_whole_take_no_more_seats_than_there_are(
    keys: Keys,
) -> None:
    edge = make_edge(hangs_after(), keys=keys.book)
    async with slow_bodies(edge, keys.user, 0):
        slow = [SlowBody(edge, keys.user) for _ in range(5)]
        await asyncio.sleep(0)
        for one in slow:
            one.give(b'"prompt": "Hi"', b"}")
        await eventually(lambda: sum(bool(one.statuses) for one in slow) == 3)
        assert [one.statuses for one in slow] == [[], [], [429], [429], [429]]
        assert edge.metric("pdserve_api_key_requests_in_progress", key="user") == 2
        for one in slow:
            await one.leave()
    assert edge.metric("pdserve_api_key_requests_in_progress", key="user") == 0


async def test_what_is_held_is_bounded_and_the_heaviest_goes(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ArrivingBodies] = []

    def small() -> ArrivingBodies:
        made.append(ArrivingBodies(max_bytes=10_000))
        return made[0]

    monkeypatch.setattr(middleware, "ArrivingBodies", small)
    edge = make_edge(keys=keys.book)
    async with slow_bodies(edge, keys.user, 8) as slow:
        for one in slow:
            one.give(b" " * 2000)
            await eventually(partial(lambda one: one.statuses or not one._parts, one))
            await asyncio.sleep(0)
        assert made[0].num_bytes <= 10_000
        assert await status(edge, keys.admin) == 200
        assert {tuple(one.statuses) for one in slow} == {(), (408,)}
    assert (made[0].num_bodies, made[0].num_bytes) == (0, 0)


async def test_administrators_have_seats_beside_those_of_everybody(keys: Keys) -> None:
    edge = make_edge(hangs_after(), keys=keys.book, max_concurrent_requests=2)
    running = [asyncio.create_task(status(edge, keys.other)) for _ in range(2)]
    await eventually(lambda: len(edge.generator.calls) == 2)
    assert await status(edge, keys.other) == 429
    running += [asyncio.create_task(status(edge, keys.admin)) for _ in range(ADMIN_SEATS)]
    await eventually(lambda: len(edge.generator.calls) == 2 + ADMIN_SEATS)
    assert await status(edge, keys.admin) == 429
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert edge.metric("pdserve_requests_in_progress") == 0


async def test_the_attack_through_a_socket(keys: Keys) -> None:
    edge = make_edge(keys=keys.book, max_concurrent_requests=2)
    head = f"Host: localhost\r\nAuthorization: Bearer {keys.user}\r\nContent-Length: 100\r\n\r\n{{"
    async with served(edge.app) as port:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for number, (_, writer) in enumerate(slow):
            writer.write(f"POST {PATHS[number % len(PATHS)]} HTTP/1.1\r\n{head}".encode())
            await writer.drain()
        body = json.dumps(TEXT).encode()
        for key in (keys.admin, keys.user):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            length = len(body)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
                b"Authorization: Bearer %b\r\n\r\n%b" % (length, key.encode(), body)
            )
            async with asyncio.timeout(60):
                assert (await reader.readline()).split()[1] == b"200"
            writer.close()
        for _, writer in slow:
            writer.transport.abort()
