"""A Redis that never serves a store is told apart from one that does not serve it now."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from placement.redis_store import RedisStore
from placement.store import PlacementForbidden, PlacementRefused
from tests.support.stores.redis_server import RedisServer


async def refusal(server: RedisServer, database: int) -> PlacementRefused:
    """What asking for an epoch ends with."""
    server.start()
    url = server.url.removesuffix("/0")
    store = RedisStore(f"{url}/{database}", "unable", call_timeout_s=60.0)
    try:
        with pytest.raises(PlacementRefused) as refused:
            await store.next_epoch("a")
    finally:
        await store.close()
        server.kill()
    return refused.value


@pytest.mark.parametrize(
    ("options", "database", "words"),
    [
        ((), 9999, "DB index is out of range"),
        (("--rename-command", "EVALSHA", ""), 0, "unknown command"),
        (("--rename-command", "TIME", ""), 0, "Unknown Redis command"),
    ],
)
async def test_what_no_wait_changes_is_forbidden(
    options: tuple[str, ...], database: int, words: str, tmp_path: Path
) -> None:
    refused = await refusal(RedisServer(tmp_path, options=options), database)
    assert isinstance(refused, PlacementForbidden)
    assert words in str(refused)


async def test_a_replica_may_become_the_main_one(tmp_path: Path) -> None:
    options = ("--replicaof", "127.0.0.1", "1", "--replica-serve-stale-data", "no")
    refused = await refusal(RedisServer(tmp_path, options=options), 0)
    assert not isinstance(refused, PlacementForbidden)


async def test_a_redis_that_is_too_old_is_told_which_is_wanted() -> None:
    """Redis 4 runs no script that reads the clock and writes."""
    error = (
        "-ERR Error running script (call to f_3b9b): @user_script:44: @user_script: 44: Write "
        "commands not allowed after non deterministic commands. Call redis.replicate_commands() at "
        "the start of your script in order to switch to single commands replication mode.\r\n"
    )

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(error.encode())
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = RedisStore(f"redis://127.0.0.1:{port}/0", "unable", call_timeout_s=60.0)
    try:
        with pytest.raises(PlacementForbidden, match="is too old: wanted Redis 5 or newer"):
            await store.next_epoch("a")
    finally:
        await store.close()
        server.close()
