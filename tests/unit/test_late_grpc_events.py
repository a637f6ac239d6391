"""A gRPC event that outlives its test's event loop is no other test's error."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
import pytest


class Server:
    """Answers a call when it is told to, from threads of its own."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(2))
        answers = {"call": grpc.unary_unary_rpc_method_handler(self._answer)}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test", answers),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _answer(self, request: bytes, context: Any) -> bytes:
        self.is_asked.set()
        assert self.may_answer.wait(20)
        return request

    def stop(self) -> None:
        self.may_answer.set()
        self._server.stop(None).wait()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


async def begin(server: Server) -> Any:
    call = grpc.aio.insecure_channel(server.address).unary_unary("/test/call", None, None)(b"")
    await asyncio.to_thread(server.is_asked.wait, 20)
    return call


async def ask(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        server.may_answer.set()
        assert await channel.unary_unary("/test/call", None, None)(b"asked") == b"asked"


def test_a_late_event_is_logged_for_no_other_test(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.new_event_loop()
    call = loop.run_until_complete(begin(server))
    loop.close()
    asyncio.run(ask(server))
    assert caplog.messages == []
    del call


def test_other_errors_of_the_event_loop_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("Event loop is closed")

    async def fail_in_a_callback() -> None:
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0)

    asyncio.run(fail_in_a_callback())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
