"""TLS of connections to Redis."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest
from redis import exceptions

from placement.redis_tls import RedisTls, RedisTlsConnection
from tests.support.key_folders import make_keys, node_keys


def test_a_ca_file_may_have_comments_in_any_language(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys")
    ca = folder / "node/ca.pem"
    ca.write_bytes("# Prüfstelle\n".encode() + ca.read_bytes())
    (trusted,) = RedisTls(node_keys(folder)).context().get_ca_certs()
    assert "pdserve cluster CA" in str(trusted["subject"])


@contextmanager
def silent_redis(folder: Path) -> Iterator[int]:
    """A server that shakes hands, and then neither reads nor answers; the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "redis/cert.pem", folder / "redis/key.pem")
    accepted: list[ssl.SSLSocket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                accepted.append(context.wrap_socket(listening.accept()[0], server_side=True))

        thread = Thread(target=accept)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            with socket.create_connection(listening.getsockname()):
                pass  # where nobody has come
            thread.join()
            for one in accepted:
                one.close()


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[RedisTlsConnection]:
    """A connection to a silent Redis, whose socket must be closed at the end."""
    keys = make_keys(folder)
    with silent_redis(keys) as port:
        connection = RedisTlsConnection(
            tls=RedisTls(node_keys(keys)),
            host="127.0.0.1",
            port=port,
            redis_connect_func=lambda _: None,
        )
        await connection.connect()  # type: ignore[no-untyped-call]
        assert connection._writer is not None
        opened = connection._writer.get_extra_info("socket")
        yield connection
        await asyncio.sleep(0)  # the loop closes it after this turn
        assert opened.fileno() < 0


async def test_a_connection_that_failed_waits_for_no_goodbye(tmp_path: Path) -> None:
    """A silent server says none, and each call that failed kept a socket for 30 s."""
    async with opened(tmp_path / "keys") as connection:
        await connection.disconnect(nowait=True)


async def test_one_that_is_closed_in_order_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    async with opened(tmp_path / "keys") as connection:
        connection.socket_connect_timeout = 0.01
        with pytest.raises(exceptions.TimeoutError, match="closing connection"):
            await connection.disconnect()
