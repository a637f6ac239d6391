"""A store that is slow or away delays the start of a process; one that forbids it ends it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from common.errors import PlacementUnavailable
from placement import first_answer
from placement.first_answer import TRIES_PER_LINE, wait_for_store
from placement.redis_store import RedisStore
from placement.store import PlacementForbidden, PlacementRefused, PlacementSlow
from tests.support.key_folders import make_keys, router_keys
from tests.support.stores.redis_server import RedisServer


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


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_answer, "PAUSE_S", 0.0)


@pytest.mark.parametrize("kind", [PlacementUnavailable, PlacementSlow, PlacementRefused])
async def test_a_store_that_does_not_answer_is_asked_again_and_told_of_once(
    kind: type[PlacementUnavailable], caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(*[kind("Redis did not answer")] * (TRIES_PER_LINE - 1))
    assert await wait_for_store(store.next_epoch) == 7
    assert store.num_calls == TRIES_PER_LINE
    assert len(caplog.messages) == 1
    assert "Redis did not answer" in caplog.text


async def test_a_long_wait_is_told_of_again(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(*[PlacementUnavailable("refused")] * (3 * TRIES_PER_LINE))
    assert await wait_for_store(store.next_epoch) == 7
    assert len(caplog.messages) == 3


async def test_a_store_that_forbids_is_not_waited_for() -> None:
    store = Store(PlacementForbidden("wrong password"))
    with pytest.raises(PlacementForbidden, match="wrong password"):
        await wait_for_store(store.next_epoch)
    assert store.num_calls == 1


@pytest.mark.parametrize("accepts", [True, False])
async def test_redis_that_says_nothing_is_slow_and_one_that_refuses_is_away(accepts: bool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if accepts:
            silent.listen()
        port = silent.getsockname()[1]
        timeout_s = 0.05 if accepts else 60.0
        store = RedisStore(f"redis://127.0.0.1:{port}/0", "contract", call_timeout_s=timeout_s)
        with pytest.raises(PlacementUnavailable) as failed:
            await store.live_nodes()
        assert isinstance(failed.value, PlacementSlow) is accepts
        if not accepts:
            away = f"Redis is unreachable: 127.0.0.1:{port}: Connection refused"
            assert str(failed.value) == away, "without the number of the error"
        await store.close()


async def test_a_redis_with_a_certificate_of_another_cluster_is_not_waited_for(
    tmp_path: Path,
) -> None:
    ours, theirs = make_keys(tmp_path / "ours"), make_keys(tmp_path / "theirs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(theirs / "redis/cert.pem", theirs / "redis/key.pem")
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    url = f"rediss://127.0.0.1:{port}/0"
    store = RedisStore(url, "contract", keys=router_keys(ours), call_timeout_s=60.0)
    with pytest.raises(PlacementForbidden, match="certificate"):
        await store.live_nodes()
    await store.close()
    server.close()
    await server.wait_closed()


async def test_a_redis_without_tls_that_is_asked_in_tls_is_slow_and_told() -> None:
    """It takes the greeting for the beginning of a command, whose end it waits for."""
    server = await asyncio.start_server(_read, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = RedisStore(f"rediss://127.0.0.1:{port}/0", "contract", call_timeout_s=0.05)
    with pytest.raises(PlacementSlow, match="without TLS is silent to rediss://: wanted redis://"):
        await store.live_nodes()
    await store.close()
    server.close()


async def test_a_redis_with_tls_that_is_asked_without_it_is_told(tmp_path: Path) -> None:
    keys = make_keys(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "redis/cert.pem", keys / "redis/key.pem")
    server = await asyncio.start_server(_read, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    store = RedisStore(f"redis://127.0.0.1:{port}/0", "contract", call_timeout_s=60.0)
    with pytest.raises(PlacementUnavailable, match=r"ends a connection .*: wanted rediss://"):
        await store.live_nodes()
    await store.close()
    server.close()


async def test_a_redis_that_has_answered_before_was_asked_as_it_wants(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    store = RedisStore(redis.url, "contract", call_timeout_s=60.0)
    assert await store.live_nodes() == []
    redis.kill()
    server = await asyncio.start_server(_hang_up, "127.0.0.1", redis.port)
    with pytest.raises(PlacementUnavailable) as away:
        await store.live_nodes()
    assert "unreachable" in str(away.value)
    assert "wanted" not in str(away.value)
    await store.close()
    server.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.close()
