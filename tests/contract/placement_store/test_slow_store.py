"""A store that is only slow does not keep a process from starting; one that is away does."""

from __future__ import annotations

import asyncio

import pytest

from placement.redis_store import RedisStore
from placement.store import NUM_TRIES, PlacementSlow, PlacementUnavailable, retry_while_slow


class Store:
    """Raises what is left of `errors`, then answers."""

    def __init__(self, *errors: PlacementUnavailable) -> None:
        self.errors = list(errors)
        self.num_calls = 0

    async def next_epoch(self) -> int:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


async def test_a_slow_store_is_asked_again_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store(*[PlacementSlow("Redis did not answer within 0.5 s")] * (NUM_TRIES - 1))
    assert await retry_while_slow(store.next_epoch) == 7
    assert store.num_calls == NUM_TRIES
    assert len(caplog.messages) == 1
    assert "Redis did not answer within 0.5 s" in caplog.text


async def test_a_store_that_stays_slow_is_given_up() -> None:
    store = Store(*[PlacementSlow("slow")] * 100)
    with pytest.raises(PlacementSlow):
        await retry_while_slow(store.next_epoch)
    assert store.num_calls == NUM_TRIES


async def test_a_store_that_is_away_is_not_waited_for() -> None:
    store = Store(PlacementUnavailable("refused"))
    with pytest.raises(PlacementUnavailable, match="refused"):
        await retry_while_slow(store.next_epoch)
    assert store.num_calls == 1


@pytest.mark.parametrize("accepts", [True, False])
async def test_redis_that_says_nothing_is_slow_and_one_that_refuses_is_away(accepts: bool) -> None:
    release = asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if not accepts:
        server.close()
        await server.wait_closed()
    timeout_s = 0.05 if accepts else 60.0
    store = RedisStore(f"redis://127.0.0.1:{port}/0", "contract", call_timeout_s=timeout_s)
    with pytest.raises(PlacementUnavailable) as failed:
        await store.live_nodes()
    assert isinstance(failed.value, PlacementSlow) is accepts
    release.set()
    await store.close()
    server.close()
    await server.wait_closed()
