"""What the Redis store does where the server that took writes has changed."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError

from common.errors import PlacementUnavailable
from placement.redis_store import RedisStore


class FakePrimary:
    """Names a server whose calls fail, one error after the other, and then answer."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_looked_up = 0
        self.is_doubtful = True

    async def client(self) -> FakePrimary:
        self.num_looked_up += self.is_doubtful
        self.is_doubtful = False
        return self

    def doubt(self) -> None:
        self.is_doubtful = True

    async def reconnect(self) -> None:
        self.is_doubtful = True

    async def zrange(self, *_: Any) -> list[bytes]:
        if self.errors:
            raise self.errors.pop(0)
        return []


@pytest.fixture
def primary(monkeypatch: pytest.MonkeyPatch) -> FakePrimary:
    fake = FakePrimary()
    monkeypatch.setattr("placement.redis_store.RedisPrimary", lambda *_, **__: fake)
    return fake


async def test_a_call_that_a_former_primary_refuses_is_made_again(primary: FakePrimary) -> None:
    store = RedisStore("redis+sentinel://s/main", "c")
    primary.errors = [ReadOnlyError("it is a replica")]
    assert await store.live_nodes() == []
    assert primary.num_looked_up == 2


async def test_a_server_that_fails_right_after_a_change_is_looked_up_again(
    primary: FakePrimary,
) -> None:
    store = RedisStore("redis+sentinel://s/main", "c")
    primary.errors = [ReadOnlyError("it is a replica"), RedisConnectionError("it is gone")]
    with pytest.raises(PlacementUnavailable):
        await store.live_nodes()
    assert await store.live_nodes() == []
    assert primary.num_looked_up == 3
