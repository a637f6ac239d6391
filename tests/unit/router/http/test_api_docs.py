"""`/openapi.json` is made beside the event loop, which goes on with streams meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from router.http import api_docs
from router.http.documented_api import documented_api
from tests.support.http.http_edge import make_edge
from tests.support.http.http_server import eventually
from tests.support.http.scripted_generator import plays


async def test_the_description_is_made_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[int] = []

    def noted(*given: Any) -> Any:
        makers.append(threading.get_ident())
        return documented_api(*given)

    monkeypatch.setattr(api_docs, "documented_api", noted)
    async with make_edge(plays([])).client() as client:
        first, again = await client.get("/openapi.json"), await client.get("/openapi.json")
    assert first.json() == again.json()
    assert len(makers) == 1
    assert makers[0] != threading.get_ident()


class Making:
    """Makes descriptions one after the other, each when it is told to."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.go_on = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, *_: Any) -> dict[str, int]:
        self.num_begun += 1
        assert self.go_on.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        return {"number": self.num_begun}

    async def begun(self, number: int) -> None:
        await eventually(lambda: self.num_begun == number)


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> Making:
    making = Making()
    monkeypatch.setattr(api_docs, "documented_api", making)
    return making


async def test_clients_that_ask_at_once_wait_for_one_description(making: Making) -> None:
    async with make_edge(plays([])).client() as client:
        asking = [asyncio.create_task(client.get("/openapi.json")) for _ in range(20)]
        await making.begun(1)
        making.go_on.release(20)
        replies = await asyncio.gather(*asking)
    assert [reply.json() for reply in replies] == [{"number": 1}] * 20


async def test_a_client_that_hangs_up_first_does_not_end_it(making: Making) -> None:
    async with make_edge(plays([])).client() as client:
        first = asyncio.create_task(client.get("/openapi.json"))
        await making.begun(1)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(client.get("/openapi.json"))
        making.go_on.release(2)
        assert (await second).json() == {"number": 1}


async def test_a_description_that_fails_is_made_again(making: Making) -> None:
    making.error = MemoryError()
    making.go_on.release(2)
    async with make_edge(plays([])).client() as client:
        assert (await client.get("/openapi.json")).status_code == 500
        making.error = None
        assert (await client.get("/openapi.json")).json() == {"number": 2}
