"""What a request was made of is freed at its end, without the garbage collector.

A collection stops every stream of a busy router for milliseconds, and each cycle brings the next
one nearer.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.access.api_key_book import ApiKeyBook
from router.access.api_keys import add_api_key
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import make_edge
from tests.support.http.http_server import eventually, raw_request, served
from tests.support.http.scripted_generator import hangs_after, says

REQUEST = ("router.access.", "router.api.", "router.core.", "router.dispatch.", "router.http.")
CONNECTION = ("http_serving.", "uvicorn.")
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/tokenize": {"prompt": "Hi"},
}
TEXT = "/v1/completions"


def objects_of(modules: tuple[str, ...]) -> Counter[str]:
    """The objects that the collector knows of types of these modules, by type."""
    found = Counter[str]()
    for one, count in Counter(map(type, gc.get_objects())).items():
        if str(one.__module__).startswith(modules):  # some types' is a descriptor
            found[f"{one.__module__}.{one.__qualname__}"] += count
    return found


async def leaves_nothing(
    ask: Callable[[], Awaitable[None]], modules: tuple[str, ...] = REQUEST + CONNECTION
) -> None:
    gc.disable()
    try:
        for _ in range(3):
            await ask()
        before = objects_of(modules)
        for _ in range(3):
            await ask()
        assert objects_of(modules) - before == Counter()
    finally:
        gc.enable()


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_an_answered_request(path: str, is_stream: bool) -> None:
    edge = make_edge(says("Hello there"))
    body = {"model": "tiny", "stream": is_stream} | BODIES[path]
    async with served(edge.app) as port, httpx.AsyncClient() as client:

        async def ask() -> None:
            answer = await client.post(f"http://127.0.0.1:{port}{path}", json=body)
            assert answer.status_code == 200
            edge.generator.calls.clear()

        await leaves_nothing(ask)


@pytest.mark.parametrize(("prompt", "status"), [([], 400), ("x" * 2000, 413)])
async def test_a_refused_body(prompt: object, status: int) -> None:
    async with served(make_edge(max_body=1024).app) as port, httpx.AsyncClient() as client:

        async def ask() -> None:
            body = {"model": "tiny", "prompt": prompt}
            answer = await client.post(f"http://127.0.0.1:{port}{TEXT}", json=body)
            assert answer.status_code == status

        await leaves_nothing(ask)


async def test_a_request_with_a_key_that_has_limits(tmp_path: Path) -> None:
    path = tmp_path / "api_keys.json"
    key = add_api_key(path, "user", max_concurrent=1, requests_per_minute=600)
    edge = make_edge(keys=ApiKeyBook(ManualClock(), path=path))
    body = {"model": "tiny", "prompt": "Hi"}
    async with served(edge.app) as port, httpx.AsyncClient() as client:

        async def ask() -> None:
            given = {"authorization": f"Bearer {key}"}
            answer = await client.post(f"http://127.0.0.1:{port}{TEXT}", json=body, headers=given)
            assert answer.status_code == 200
            edge.generator.calls.clear()

        await leaves_nothing(ask)


async def test_a_client_that_leaves() -> None:
    """Its connection, of which one half is open, is watched for a while."""
    edge = make_edge(hangs_after())
    body = json.dumps({"model": "tiny", "prompt": "Hi", "stream": True}).encode()
    left = {"endpoint": "completions", "outcome": "client_closed"}
    async with served(edge.app) as port:

        async def ask() -> None:
            num_left = edge.metric("pdserve_requests_total", **left)
            async with raw_request(port, TEXT, body):
                await eventually(lambda: edge.generator.calls)
            await eventually(lambda: edge.metric("pdserve_requests_total", **left) > num_left)
            edge.generator.calls.clear()

        await leaves_nothing(ask, REQUEST)
