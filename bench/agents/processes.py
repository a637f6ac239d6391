"""The processes below a running cluster: their CPU time, and nodes that are replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.running_cluster import POLL_S, STOP_TIMEOUT_S, RunningCluster
from pdserve.local_cluster import exec_child

START_TIMEOUT_S = 300.0
DRAIN_TIMEOUT_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU time, in seconds, of a process and of all below it, also those that ended."""
    return sum(_cpu_s(one) for one in (pid, *_below(pid)))


def pids_by_name(pid: int) -> dict[str, int]:
    """Return the router and the nodes that `pdserve up` has started as the process `pid`."""
    commands = {one: _command(one) for one in _below(pid)}
    return {
        Path(command[-1]).stem: one
        for one, command in commands.items()
        if command and command[-1].endswith(".toml")
    }


def configurations(pid: int) -> list[Path]:
    """Return the files that configure these."""
    return [Path(_command(one)[-1]) for one in pids_by_name(pid).values()]


class Replacements:
    """Nodes that were started in place of others; `stop` ends them."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._started: list[subprocess.Popen[bytes]] = []

    async def replace(self, names: Sequence[str]) -> None:
        """For each node start another one of its settings, then drain it, as in a rollout.

        Raises `RuntimeError` if there is no such node, or one does not come or go in time.
        """
        for name in names:
            pid, command = self._node(name)
            again = f"{name}-again"
            self._started.append(_start([*command, "--node-id", again]))
            await self._until(again, is_there=True, timeout_s=START_TIMEOUT_S)
            os.kill(pid, signal.SIGTERM)
            await self._until(name, is_there=False, timeout_s=DRAIN_TIMEOUT_S)

    async def stop(self) -> None:
        """End the nodes that were started; one that does not drain in time is killed."""
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _node(self, name: str) -> tuple[int, list[str]]:
        """Return the process of a node, and its command."""
        pid = pids_by_name(self._cluster.pid).get(name)
        if pid is None:
            raise RuntimeError(f"no process of the cluster is {name}")
        return pid, _command(pid)

    async def _until(self, name: str, *, is_there: bool, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while (name in await self._cluster.nodes()) is not is_there:
                if any(process.poll() is not None for process in self._started):
                    raise RuntimeError(f"a node ended while {name} was waited for")
                await asyncio.sleep(POLL_S)


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, whatever ends this one."""
    root = str(Path(exec_child.__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, exec_child.__file__, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": root},
    )


def _below(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and theirs."""
    for child in _children(pid):
        yield child
        yield from _below(child)


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(one) for task in tasks for one in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # Its own, and that of children that have ended.
    return sum(map(int, fields[11:15])) / _TICKS_PER_S
