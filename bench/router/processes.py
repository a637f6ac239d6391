"""The processes of a measurement, each pinned to a core, and their resource use by the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.remote import Remote
from bench.router.idle_nodes import IdleNodes
from bench.router.load import LoadClient
from bench.router.node_stand_in import CLUSTER, NodeStandIn
from common.observing.clock import MonotonicClock
from pdserve.commands.cluster_status import fetch_cluster
from pdserve.commands.http_client import RouterRefused, RouterUnreachable
from pdserve.keys.redis_acl import keyless_acl
from pdserve.local_cluster.embedded_redis import start_embedded_redis
from pdserve.local_cluster.free_ports import free_loopback_port
from pdserve.local_cluster.signals import Signals

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Cores:
    """Which core each process has; node stand-in, clients and Redis share one."""

    router: int
    others: int

    @classmethod
    def chosen(cls) -> Cores:
        """Choose the cores; `RuntimeError` with fewer than two: the processes could not be measured
        apart."""
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            raise RuntimeError("the router needs a core of its own: wanted at least 2 cores")
        return cls(router=usable[-1], others=usable[0])


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A router with its nodes and clients. `pids` are all processes by name."""

    load: Remote
    pids: dict[str, int]
    redis_url: str
    idle: Remote | None

    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds of each process since its start."""
        return {name: cpu_s(pid) for name, pid in self.pids.items()}

    def num_misplaced(self) -> int:
        """Return how many requests were given to idle nodes."""
        return 0 if self.idle is None else int(self.idle.call("num_calls"))

    def router_rss_bytes(self) -> int:
        return rss_bytes(self.pids["router"])


@contextmanager
def running_system(
    model_folder: Path, pieces: list[list[int]], step_s: float, *, num_nodes: int = 2
) -> Iterator[RunningSystem]:
    """Run Redis, the node stand-in, a router by `pdserve serve`, and the clients' process.

    Of `num_nodes` two answer, and the others are idle.
    """
    cores = Cores.chosen()
    name = model_folder.name
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-router-")))
        with Signals() as signals:
            redis = start_embedded_redis(
                folder, folder / "redis.log", signals, MonotonicClock(), acl=keyless_acl()
            )
        stack.callback(redis.child.kill)
        os.sched_setaffinity(redis.child.pid, {cores.others})
        nodes = stack.enter_context(
            closing(Remote(NodeStandIn, cores.others, redis.url, name, pieces, step_s))
        )
        nodes_pid = nodes.call("pid")
        idle = None
        if num_nodes > 2:
            idle = Remote(IdleNodes, cores.others, redis.url, name, num_nodes - 2)
            stack.enter_context(closing(idle)).call("pid")
        port = free_loopback_port()
        flags = ["--model", str(model_folder), "--redis-url", redis.url, "--port", str(port)]
        log_path = folder / "router.log"
        router_pid = stack.enter_context(_router(flags, port, log_path, cores.router, num_nodes))
        load = stack.enter_context(closing(Remote(LoadClient, cores.others, port, name)))
        pids = {
            "router": router_pid,
            "nodes": nodes_pid,
            "clients": load.call("pid"),
            "redis": redis.child.pid,
        }
        yield RunningSystem(load, pids, redis.url, idle)


@contextmanager
def _router(
    flags: Sequence[str], port: int, log_path: Path, core: int, num_nodes: int
) -> Iterator[int]:
    command = [sys.executable, "-m", "pdserve", "serve", "--role", "router", "--cluster", CLUSTER]
    root = str(Path(__file__).resolve().parent.parent.parent)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": root},
        )
    try:
        # Not set in the child before exec: a process that uses gRPC must not run code after a fork.
        os.sched_setaffinity(process.pid, {core})
        _wait_ready(process, port, num_nodes)
        yield process.pid
    except BaseException:
        sys.stderr.write(log_path.read_text(errors="replace"))
        raise
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, num_nodes: int) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the router ended with {process.returncode}")
        if _hears_all_nodes(port, num_nodes):
            return
        time.sleep(_POLL_S)
    raise RuntimeError(f"the router was not ready after {_START_TIMEOUT_S:.0f} s")


def _hears_all_nodes(port: int, num_nodes: int) -> bool:
    try:
        return len(fetch_cluster(f"http://127.0.0.1:{port}").nodes) == num_nodes
    except (RouterUnreachable, RouterRefused):
        return False


def cpu_s(pid: int) -> float:
    """Return user and system time of a process, threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    user_ticks, system_ticks = int(fields[11]), int(fields[12])
    return (user_ticks + system_ticks) / _TICKS_PER_S


def rss_bytes(pid: int) -> int:
    """Return the bytes of a process that are in RAM now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
