"""What requests are read as, on one connection, whatever segments they come in."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Receive, Scope, Send

from http_serving.bounded_connections import ConnectionLimits
from http_serving.server import bind, make_server
from tests.support.http.http_server import eventually


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers what it was asked, as JSON on a line."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    asked = {
        "method": scope["method"],
        "path": scope["path"],
        "version": scope["http_version"],
        "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
        "body": body.decode(),
    }
    text = json.dumps(asked).encode() + b"\n"
    headers = [(b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def exchange(*segments: bytes, num_answers: int = 1) -> list[dict[str, Any]]:
    """What `num_answers` requests were read as, on one connection, sent in these segments."""
    listener = bind("127.0.0.1", 0, backlog=4)
    limits = ConnectionLimits(max_connections=4, request_timeout_s=30.0, idle_timeout_s=30.0)
    server = make_server(echo, limits=limits, end_within_s=1.0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        await eventually(lambda: server.server_state.connections)
        (connection,) = server.server_state.connections
        for segment in segments:  # each is read on its own, however the kernel joins them
            connection.data_received(segment)
        answers = []
        for _ in range(num_answers):
            async with asyncio.timeout(30):
                head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            answers.append(json.loads(await reader.readline()))
        return answers
    finally:
        writer.transport.abort()
        server.should_exit = True
        await serving
