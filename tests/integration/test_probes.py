"""Whether a silent process runs: a real one that is frozen, or whose interpreter lock is held."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from router.dispatch.node_clients import CHANNEL_OPTIONS
from router.dispatch.probes import MAX_PROBES, Probes
from tests.key_folders import make_keys, router_keys

HELD_S = 2
# A node's port. Each line that it reads makes it hold the interpreter lock for a while.
CHILD = f"""
import asyncio, ctypes, sys
from pathlib import Path
from common.keys_folder import load_keys
from common.nodes import Role
from node.control_port import ControlPort
from protos.pdserve_node_pb2_grpc import NodeServicer

def hold():
    for _ in sys.stdin:
        print("holds", flush=True)
        ctypes.PyDLL(None).sleep({HELD_S})

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
        """Return when its Python has stopped."""
        assert self._process.stdin is not None
        self._process.stdin.write("now\n")
        self._process.stdin.flush()
        assert await self.read_line() == "holds"

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


async def test_a_process_whose_python_is_busy_accepts_and_a_frozen_one_does_not() -> None:
    asked = Probes(CHANNEL_OPTIONS, None)
    async with child() as (process, address):
        await process.hold_the_lock()
        held_at_s = time.monotonic()
        assert await asked.is_accepted(address)
        assert time.monotonic() - held_at_s < HELD_S, "while the lock was held"
        process.send(signal.SIGSTOP)
        assert not await asked.is_accepted(address)
        process.send(signal.SIGCONT)
        assert await asked.is_accepted(address)


async def test_with_keys_a_process_that_runs_accepts_and_a_frozen_one_does_not(
    tmp_path: Path,
) -> None:
    """A handshake asks Python for the present certificate, so a busy one is not told apart."""
    folder = make_keys(tmp_path / "keys")
    asked = Probes(CHANNEL_OPTIONS, router_keys(folder))
    async with child(folder) as (process, address):
        assert await asked.is_accepted(address)
        process.send(signal.SIGSTOP)
        assert not await asked.is_accepted(address)
        process.send(signal.SIGCONT)
        assert await asked.is_accepted(address)


async def test_nobody_listens() -> None:
    assert not await Probes(CHANNEL_OPTIONS, None).is_accepted("127.0.0.1:1")


async def test_only_so_many_are_asked_at_once() -> None:
    asked = Probes(CHANNEL_OPTIONS, None)
    async with child() as (process, address):
        process.send(signal.SIGSTOP)
        waiting = [asyncio.create_task(asked.is_accepted(address)) for _ in range(MAX_PROBES)]
        await asyncio.sleep(0)
        process.send(signal.SIGCONT)
        assert not await asked.is_accepted(address), "although it runs"
        assert await asyncio.gather(*waiting) == [True] * MAX_PROBES
        assert await asked.is_accepted(address)
