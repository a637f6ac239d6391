"""API keys at the edge: who gets in, what a key's limits count, and when a request has ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.api_key_book import ApiKeyBook
from router.access.api_keys import add_api_key, revoke_api_key
from router.access.middleware import ApiKeyMiddleware
from router.access.refused_logins import RefusedLogins
from router.access.refused_requests import RefusedRequests
from router.http.routes import Access, MatchedRoute, put_route
from tests.support.clocks.manual_clock import ManualClock
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.http_server import eventually, raw_request, served
from tests.support.http.scripted_generator import fails, hangs_after, runs_out_of_time

PATH = "/v1/completions"
Serve = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "api_keys.json"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def guarded(app: ASGIApp, book: ApiKeyBook, access: Access = Access.LIMITED) -> Serve:
    """An application of one route."""
    clock = ManualClock()
    logins = RefusedLogins(clock, CollectorRegistry())
    keyed = ApiKeyMiddleware(app, book, logins, RefusedRequests(clock))

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        put_route(scope, MatchedRoute(access, app))
        await keyed(scope, receive, send)

    return serve


def running(edge: Edge, name: str) -> float:
    return edge.metric("pdserve_api_key_requests_in_progress", key=name)


def counted(edge: Edge, name: str, outcome: str) -> float:
    return edge.metric("pdserve_api_key_requests_total", key=name, outcome=outcome)


def wrong(response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of an error in OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["type"], error["message"]


async def test_only_keys_of_the_file_get_in(path: Path) -> None:
    alice = add_api_key(path, "alice")
    edge = make_edge(keys=ApiKeyBook(ManualClock(), path=path))
    async with edge.client() as client:
        for key in ("", "x", alice[:-1], alice + "x", alice.upper(), "alice"):
            assert (await client.post(PATH, json=TEXT, headers=bearer(key))).status_code == 401
        assert edge.generator.calls == []
        assert (await client.post(PATH, json=TEXT, headers=bearer(alice))).status_code == 200
    assert counted(edge, "alice", "accepted") == 1


async def test_a_revoked_key_is_refused_without_a_restart(path: Path) -> None:
    alice, clock = add_api_key(path, "alice"), ManualClock()
    edge = make_edge(keys=ApiKeyBook(clock, path=path))
    async with edge.client(headers=bearer(alice)) as client:
        assert (await client.get("/v1/models")).status_code == 200
        revoke_api_key(path, "alice")
        clock.advance(1)
        assert (await client.get("/v1/models")).status_code == 401
    names = {sample.labels.get("key") for f in edge.registry.collect() for sample in f.samples}
    assert "alice" not in names


async def test_too_many_a_minute(path: Path) -> None:
    alice, bob = add_api_key(path, "alice", requests_per_minute=2), add_api_key(path, "bob")
    clock = ManualClock()
    edge = make_edge(keys=ApiKeyBook(clock, path=path))
    async with edge.client() as client:
        for _ in range(2):
            assert (await client.post(PATH, json=TEXT, headers=bearer(alice))).status_code == 200
        refused = await client.post(PATH, json=TEXT, headers=bearer(alice))
        assert wrong(refused) == (
            429,
            "rate_limit_error",
            "the API key 'alice' may send 2 requests per minute: try again in 30 s",
        )
        assert refused.headers["retry-after"] == "30"
        assert "x-request-id" in refused.headers
        # What makes no node work is not counted, and nobody else is touched.
        assert (await client.get("/v1/models", headers=bearer(alice))).status_code == 200
        assert (await client.post(PATH, json=TEXT, headers=bearer(bob))).status_code == 200
        clock.advance(30)
        assert (await client.post(PATH, json=TEXT, headers=bearer(alice))).status_code == 200
    assert counted(edge, "alice", "accepted") == 3
    assert counted(edge, "alice", "rate_limited") == 1
    assert len(edge.generator.calls) == 4


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_seat_is_held_to_the_end_of_the_answer_and_given_back(
    path: Path, is_stream: bool
) -> None:
    alice = add_api_key(path, "alice", max_concurrent=1)
    edge = make_edge(hangs_after(), keys=ApiKeyBook(ManualClock(), path=path))
    body = json.dumps(TEXT | {"stream": is_stream}).encode()
    async with served(edge.app) as port, edge.client(headers=bearer(alice)) as client:
        header = f"Authorization: Bearer {alice}\r\n"
        async with raw_request(port, PATH, body, headers=header):
            await eventually(lambda: running(edge, "alice") == 1)
            refused = await client.post(PATH, json=TEXT)
            assert wrong(refused) == (
                429,
                "rate_limit_error",
                "the API key 'alice' may have 1 requests in progress: try again in 1 s",
            )
            assert refused.headers["retry-after"] == "1"
        # The client left.
        await eventually(lambda: running(edge, "alice") == 0)
    assert counted(edge, "alice", "concurrency_limited") == 1


async def test_a_seat_comes_back_from_whatever_ends_the_request(path: Path) -> None:
    alice = add_api_key(path, "alice", max_concurrent=1)
    book, time = ApiKeyBook(ManualClock(), path=path), StoppedTime()
    late = make_edge(runs_out_of_time(time), keys=book, clock=time)
    ends: list[tuple[dict[str, Any], Edge]] = [
        (TEXT, make_edge(keys=book)),
        (TEXT | {"stream": True}, make_edge(keys=book)),
        (TEXT | {"n": 0}, make_edge(keys=book)),
        (TEXT | {"model": "another"}, make_edge(keys=book)),
        (TEXT, make_edge(fails(RuntimeError("x")), keys=book)),
        (TEXT | {"stream": True}, make_edge(fails(RuntimeError("x")), keys=book)),
        (TEXT | {"stream": True}, late),
    ]
    for body, edge in ends:
        async with edge.client(headers=bearer(alice)) as client:
            response = await client.post(PATH, json=body)
            assert response.status_code != 429
        assert running(edge, "alice") == 0
    assert counted(ends[0][1], "alice", "accepted") == len(ends)


async def test_a_seat_comes_back_when_the_application_is_cancelled_or_fails(path: Path) -> None:
    alice = add_api_key(path, "alice", max_concurrent=1).encode()
    book = ApiKeyBook(ManualClock(), path=path)
    started = asyncio.Event()

    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        await asyncio.Event().wait()

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("a bug")

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    def scope() -> Scope:
        headers = [(b"authorization", b"Bearer " + alice)]
        return {"type": "http", "method": "POST", "path": PATH, "headers": headers}

    task = asyncio.create_task(guarded(hang, book)(scope(), receive, send))
    await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(2):
        with pytest.raises(KeyError, match="a bug"):
            await guarded(fail, book)(scope(), receive, send)
    (used,) = book.in_use()
    assert used.limits.num_running == 0


async def test_what_follows_knows_whose_request_it_is(path: Path) -> None:
    keys = {
        add_api_key(path, "alice"): ("alice", False),
        add_api_key(path, "root", is_admin=True): ("root", True),
        "k": ("--api-key", True),
    }
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["state"]["api_key_name"], scope["state"]["is_admin"]))

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    book = ApiKeyBook(ManualClock(), path=path, api_key="k")
    for key in keys:
        headers = [(b"authorization", b"Bearer " + key.encode())]
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
        await guarded(app, book, Access.KEY)(scope, nothing, nothing)
    open_scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    await guarded(app, ApiKeyBook(ManualClock()))(open_scope, nothing, nothing)
    assert seen == [*keys.values(), ("", True)]


async def test_draining_needs_an_admin_s_key(path: Path) -> None:
    alice = add_api_key(path, "alice")
    edge = make_edge(keys=ApiKeyBook(ManualClock(), path=path))
    async with edge.client() as client:
        response = await client.post("/v1/cluster/drain", json={}, headers=bearer(alice))
        status, kind, message = wrong(response)
        assert (status, kind) == (403, "invalid_request_error")
        assert "'alice' is not an administrator's" in message
        assert (await client.post("/v1/cluster/drain", json={})).status_code == 401


async def test_what_a_stranger_sees(path: Path) -> None:
    add_api_key(path, "alice")
    book = ApiKeyBook(ManualClock(), path=path, metrics_token="prometheus")
    edge = make_edge(keys=book)
    async with edge.client() as client:
        page = await client.get("/")
        assert (page.status_code, page.headers["www-authenticate"]) == (401, "Bearer")
        assert page.headers["content-type"].startswith("text/html")
        for path_ in ("/health", "/ready"):
            assert (await client.get(path_)).status_code == 200
        for path_ in ("/v1/live", "/docs", "/openapi.json", "/v1/cluster", "/metrics", "/none"):
            assert (await client.get(path_)).status_code == 401, path_
        for path_ in ("/", "/health", "/ready"):
            assert (await client.post(path_)).status_code == 401, path_
        token = bearer("prometheus")
        for path_ in ("/metrics", "/v1/cluster/targets", "/v1/scaling"):
            assert (await client.get(path_, headers=token)).status_code == 200
            assert (await client.get(path_)).status_code == 401
        for path_ in ("/v1/models", "/v1/cluster"):
            assert (await client.get(path_, headers=token)).status_code == 401
