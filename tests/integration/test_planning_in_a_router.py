"""A real router plans large bodies in a child, which never outlives it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.clocks.waiting import wait_until
from tests.support.cluster.cluster import Cluster, ClusterSpec
from tests.support.cluster.processes import ServeProcess, is_alive
from tests.support.stores.redis_server import RedisServer

BODY = json.dumps({"model": "tiny", "prompt": "a", "metadata": "x" * (4 << 20)})
BAD_BODY = json.dumps({"model": "tiny", "prompt": [[1.5] * (1 << 20)]})


@pytest.fixture
def cluster(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    """A router alone: what it plans finds no node."""
    spec = ClusterSpec(name="planning", model=tiny_model, nodes=())
    cluster = Cluster(spec, cluster_redis, cluster_folder)
    cluster.start()
    try:
        wait_until(lambda: serves(cluster), "the router serves")
        yield cluster
    finally:
        cluster.close()


def serves(cluster: Cluster) -> bool:
    cluster.processes["router-1"].require_running()
    try:
        return httpx.get(f"{cluster.url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def post(cluster: Cluster, body: str) -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/completions", content=body, timeout=60)


def planning_pid(router: ServeProcess) -> int:
    (pid,) = router.children()
    assert "planning.child" in Path(f"/proc/{pid}/cmdline").read_text()
    return pid


def killed(router: ServeProcess) -> None:
    router.kill()


def stopped(router: ServeProcess) -> None:
    assert router.stop() == 0


def interrupted(router: ServeProcess) -> None:
    assert router.interrupt() == 0


@pytest.mark.parametrize("end", [killed, stopped, interrupted])
def test_the_child_ends_with_its_router(
    cluster: Cluster, end: Callable[[ServeProcess], None]
) -> None:
    router = cluster.processes["router-1"]
    assert router.children() == []
    assert post(cluster, BODY).status_code == 503  # planned: there is no node
    pid = planning_pid(router)
    assert post(cluster, BAD_BODY).status_code == 400
    assert planning_pid(router) == pid
    end(router)
    assert not is_alive(pid)


def test_a_stopped_child_ends_with_its_router(cluster: Cluster) -> None:
    """It cannot read the end of its input."""
    router = cluster.processes["router-1"]
    assert post(cluster, BODY).status_code == 503
    pid = planning_pid(router)
    os.kill(pid, signal.SIGSTOP)
    try:
        os.kill(router.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "the child has ended")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_router_outlives_its_child(cluster: Cluster) -> None:
    router = cluster.processes["router-1"]
    assert post(cluster, BODY).status_code == 503
    first = planning_pid(router)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_alive(first), "the child has ended")
    assert post(cluster, BODY).status_code == 503
    assert planning_pid(router) != first
