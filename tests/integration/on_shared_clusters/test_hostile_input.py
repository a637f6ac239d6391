"""Garbage and too much of everything at every port of a cluster at work.

Nothing crashes, no process ever takes more than `MOST_GROWTH_BYTES` beyond what it had, and the
requests beside it get the answers that they get in peace. Once with keys on every connection and
once without any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.attacks.attacks import ATTACKS, MESSAGE_WITHOUT_END, Attack
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.memory import forget_peak, memory_of
from tests.support.cluster.topologies import flag
from tests.support.models.tiny_model import prompt_tokens

pytestmark = pytest.mark.endurance

MIB = 1 << 20
MOST_GROWTH_BYTES = 512 * MIB
"""At the worst moment: a dozen bodies of the largest size are in work, in a few copies each."""
MOST_KEPT_BYTES = 128 * MIB
"""Afterwards: what allocators and caches keep."""
MOST_OF_A_CHILD_BYTES = 256 * MIB
"""What the process keeps that plans large bodies: a tokenizer with its caches as well."""
MOST_NEW_FILES = 16
REQUESTS: list[Fields] = [
    {"prompt": prompt_tokens(200 + i, salt=61), "max_tokens": 40, "temperature": 0}
    for i in range(4)
]


def ports(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Every port of the cluster, by what listens there."""
    found = {"router HTTP": ("127.0.0.1", int(cluster.url.rpartition(":")[2]))}
    for node in cluster.live_nodes():
        name = node.record.incarnation.node_id
        found[f"{name} gRPC"] = host_and_port(node.record.control_address)
        found[f"{name} metrics"] = host_and_port(node.record.metrics_address)
    found["decode-1 KV"] = ("127.0.0.1", int(flag(cluster.spec, "decode-1", "--kv-port")))
    assert len(found) == 6
    return found


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def files_of(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@contextmanager
def at_work(api: Api) -> Iterator[Callable[[], int]]:
    """Requests go on, and every answer is what it is in peace. Yields how many there were."""
    wanted = api.complete_all(REQUESTS)
    assert all(isinstance(answer, Answer) for answer in wanted), wanted
    stop, answers = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            answers.append(api.complete_all(REQUESTS))

    with ThreadPoolExecutor(1) as worker:
        working = worker.submit(work)
        try:
            yield lambda: len(answers)
        finally:
            stop.set()
            working.result()
    for answer in answers:
        assert answer == wanted, [str(a) for a in answer if isinstance(a, ApiFailure)]


def assert_all_hold(cluster: Cluster, api: Api, attacks: list[Attack]) -> None:
    """Every attack on every port, eight at once."""
    processes = cluster.processes
    pids = {name: process.pid for name, process in processes.items()}
    with at_work(api) as num_rounds, ThreadPoolExecutor(8) as strangers:
        files = {name: files_of(pid) for name, pid in pids.items()}
        memory = {name: memory_of(pid) for name, pid in pids.items()}
        for pid in pids.values():
            forget_peak(pid)
        jobs = [(attack, port) for attack in attacks for port in ports(cluster).values()]
        list(strangers.map(lambda job: job[0](*job[1]), jobs))
        done = num_rounds()
        wait_until(lambda: num_rounds() > done, "requests go on", timeout_s=60)
        for name, process in processes.items():
            process.require_running()
            assert process.pid == pids[name]
            peak = memory_of(process.pid, "VmHWM") - memory[name]
            assert peak < MOST_GROWTH_BYTES, f"{name} grew by {peak / MIB:.0f} MiB"
            kept = memory_of(process.pid) - memory[name]
            assert kept < MOST_KEPT_BYTES, f"{name} keeps {kept / MIB:.0f} MiB"
            for child in process.children():
                assert memory_of(child, "VmHWM") < MOST_GROWTH_BYTES
                assert memory_of(child) < MOST_OF_A_CHILD_BYTES
                print(f"{name}'s child: {memory_of(child, 'VmHWM') / MIB:.0f} MiB at most")
            print(f"{name}: {peak / MIB:.0f} MiB at most, {kept / MIB:.0f} MiB kept")
        wait_until(
            lambda: all(files_of(pids[name]) < files[name] + MOST_NEW_FILES for name in pids),
            "the strangers' connections are closed",
            timeout_s=30,
        )


@pytest.mark.parametrize("name", ATTACKS)
def test_without_keys(tiny_cluster: Cluster, tiny_api: Api, name: str) -> None:
    assert_all_hold(tiny_cluster, tiny_api, [ATTACKS[name]])


def test_with_keys(keyed_cluster: Cluster, keyed_api: Api) -> None:
    assert_all_hold(keyed_cluster, keyed_api, [*ATTACKS.values(), MESSAGE_WITHOUT_END])
