"""Watching a client while its request is worked on."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from router.http.exchange import ClientClosed, while_client_waits


class Client:
    """Waits, and leaves when told to."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}


async def test_work_is_cancelled_when_its_client_leaves() -> None:
    client, has_ended = Client(), asyncio.Event()

    async def work() -> None:
        client.leaves.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    with pytest.raises(ClientClosed):
        await while_client_waits(client.receive, work())
    assert has_ended.is_set()
    await asyncio.sleep(0)  # not cancelled any more


async def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_behind_it() -> None:
    client = Client()

    async def work() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the client is waited for before this work waits
        asyncio.get_running_loop().call_soon(client.leaves.set)
        await client.leaves.wait()
        has_ended.append(True)

    has_ended: list[bool] = []
    await while_client_waits(client.receive, work())
    for _ in range(3):
        await asyncio.sleep(0)  # a late cancellation would be raised here
    this = asyncio.current_task()
    assert this is not None
    assert (has_ended, this.cancelling()) == ([True], 0)


async def test_a_cancelled_task_is_not_taken_for_a_client_that_left() -> None:
    client, runs = Client(), asyncio.Event()

    async def work() -> None:
        runs.set()
        await asyncio.Event().wait()

    request = asyncio.create_task(while_client_waits(client.receive, work()))
    await runs.wait()
    request.cancel()
    client.leaves.set()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await while_client_waits(Client().receive, work())
