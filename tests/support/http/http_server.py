"""A web application on a real socket, and a raw client for what HTTP libraries hide."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.types import ASGIApp

from router.http.server import bind_http, serve_http


async def eventually(is_so: Callable[[], object]) -> None:
    """Let everything else run until `is_so()`; fails when that takes longer than 30 s.

    By the machine's time: the loop's may stand still.
    """
    ends_at_s = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < ends_at_s, "not within 30 s"
        await asyncio.sleep(0)


@asynccontextmanager
async def served(app: ASGIApp, *, grace_s: float = 1.0) -> AsyncIterator[int]:
    """Serve `app` on a free loopback port, which is what the block gets."""
    listener = bind_http("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    stop = asyncio.Event()
    serving = asyncio.create_task(serve_http(app, listener, stop=stop, grace_s=grace_s))
    try:
        yield port
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def raw_request(
    port: int, path: str, body: bytes, *, headers: str = ""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send one POST by hand; the block reads the answer, or does not. Small receive buffer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
