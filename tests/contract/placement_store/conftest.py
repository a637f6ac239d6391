"""The stores of which every implementation keeps the same contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.placement_store.worlds import MemoryWorld, RedisWorld, World


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    redis_world = RedisWorld(request.getfixturevalue("redis_url"))
    yield redis_world
    await redis_world.first.close()
    await redis_world.second.close()
    redis_world.client.close()
