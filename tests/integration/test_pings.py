"""Whether a process runs: a real one that is frozen, or whose interpreter lock is held."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from common.files.keys_folder import Keys
from node.control.control_port import SERVER_OPTIONS
from pdserve.keys.keys_init import HOLDERS
from protos.transport_security import open_channel
from router.dispatch.client.node_clients import CHANNEL_OPTIONS
from router.dispatch.liveness.pings import PING_INTERVAL_MS, Pings
from tests.integration.patient_pings import have_patience
from tests.support.key_folders import expired, issue, make_keys, put, router_keys, with_certificate
from tests.support.kv.tcp_proxy import TcpProxy

NUM_ANSWERS = 4
"""As many answers as pings in two seconds."""
# A node's port. From one byte that it reads to the next it holds the interpreter lock.
CHILD = """
import asyncio, ctypes, os, sys
from pathlib import Path
from common.files.keys_folder import load_keys
from common.nodes import Role
from node.control.control_port import ControlPort
from protos.pdserve_node_pb2_grpc import NodeServicer

def hold():
    libc, byte = ctypes.PyDLL(None), ctypes.create_string_buffer(1)
    while os.read(0, 1):
        print("holds", flush=True)
        libc.read(0, byte, 1)

async def main():
    keys = load_keys(Path(sys.argv[1]), Role.DECODE) if len(sys.argv) > 1 else None
    control = ControlPort("127.0.0.1", 0, keys)
    await control.serve(NodeServicer())
    print(control.port, flush=True)
    await asyncio.to_thread(hold)

asyncio.run(main())
"""


class Child:
    """A process that listens like a node."""

    def __init__(self, keys: Path | None) -> None:
        arguments = [] if keys is None else [str(keys / "node")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def read_line(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.to_thread(self._process.stdout.readline)).strip()

    async def hold_the_lock(self) -> None:
        """Return when its Python stops, until `release_the_lock`."""
        self._write()
        assert await self.read_line() == "holds"

    def release_the_lock(self) -> None:
        self._write()

    def _write(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(".")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@asynccontextmanager
async def child(keys: Path | None = None) -> AsyncIterator[tuple[Child, str]]:
    """The child and its address."""
    process = Child(keys)
    try:
        yield process, f"127.0.0.1:{await process.read_line()}"
    finally:
        process.end()


@asynccontextmanager
async def pinged(address: str, keys: Keys | None = None) -> AsyncIterator[Pings]:
    pings = Pings(address, CHANNEL_OPTIONS, keys)
    yield pings
    await pings.close()


async def wait_until(is_true: Callable[[], bool]) -> None:
    for _ in range(5000):
        if is_true():
            return
        await asyncio.sleep(0.002)
    pytest.fail("not within 10 s")


async def wait_answered(pings: Pings, is_answered: bool = True) -> None:
    await wait_until(lambda: pings.are_answered() is is_answered)


class Answers(TcpProxy):
    """Counts what a node sends to a router: without calls, it answers pings."""

    num_answers = 0

    @property
    def address(self) -> str:
        return self.endpoint.removeprefix("tcp://")

    def pump(self, source: socket.socket, sink: socket.socket, number: int, is_back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.num_answers += is_back
                sink.sendall(data)


@pytest.fixture(params=["clear", "keyed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return make_keys(tmp_path / "keys") if request.param == "keyed" else None


async def test_a_process_whose_python_is_busy_answers_and_a_frozen_one_does_not(
    folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = router_keys(folder) if folder else None
    async with child(folder) as (process, address):
        with monkeypatch.context() as patched, closing(Answers(f"tcp://{address}")) as wire:
            have_patience(patched)
            wire.open()
            async with pinged(wire.address, keys) as pings:
                await wait_answered(pings)
                await process.hold_the_lock()
                num_before = wire.num_answers
                await wait_until(lambda: wire.num_answers >= num_before + NUM_ANSWERS)
                assert pings.are_answered()
                process.release_the_lock()
        async with pinged(address, keys) as pings:
            await wait_answered(pings)
            process.send(signal.SIGSTOP)
            await wait_answered(pings, False)
            process.send(signal.SIGCONT)
            await wait_answered(pings)


def test_a_node_takes_as_many_pings_as_routers_send() -> None:
    options = dict(SERVER_OPTIONS)
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= PING_INTERVAL_MS / 2


async def test_with_a_renewed_certificate_another_connection_is_opened(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys")
    keys = with_certificate(router_keys(folder), expired(folder, "router"))
    async with child(folder) as (_, address), pinged(address, keys) as pings:
        assert not pings.are_answered()
        put(issue(folder, HOLDERS["router"]), folder / "router")
        assert keys.reload_if_changed()
        await wait_answered(pings)


async def test_nobody_listens() -> None:
    async with pinged("127.0.0.1:1") as pings:
        for _ in range(20):
            assert not pings.are_answered()
            await asyncio.sleep(0.01)


class SentBytes(TcpProxy):
    """Keeps what a router sends to a node."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._sent = bytearray()

    def pump(self, source: socket.socket, sink: socket.socket, number: int, is_back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not is_back:
                    self._sent += data
                sink.sendall(data)

    def num_pings(self) -> int:
        """Frames of HTTP/2 that are pings and answer none."""
        at, num_pings = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 0
        while at < len(self._sent):
            kind, flags = self._sent[at + 3 : at + 5]
            num_pings += kind == 6 and not flags & 1
            at += 9 + int.from_bytes(self._sent[at : at + 3])
        return num_pings


async def test_what_a_node_says_is_followed_by_no_ping() -> None:
    async def echo(numbers: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for number in numbers:
            yield number

    server = grpc.aio.server()
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("n", handlers),))
    wire = SentBytes(f"tcp://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    wire.open()
    await server.start()
    address = wire.endpoint.removeprefix("tcp://")
    async with open_channel(address, CHANNEL_OPTIONS, None) as channel:
        call = cast(Any, channel).stream_stream("/n/Echo")()
        for number in (b"1", b"2", b"3"):
            await call.write(number)
            assert await call.read() == number
        call.cancel()
    await server.stop(None)
    wire.close()
    assert wire.num_pings() == 0
