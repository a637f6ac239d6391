"""A client that leaves, and a deadline, in whatever state of its life a request of real nodes is.

Afterwards no node holds anything for it, and its router has counted and logged it once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.nodes import Role
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.clocks.patience import PATIENT
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import COMPLETIONS, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.grammars import schemas
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(400)]

DEADLINE_S = 8.0
"""More than it takes to get into a state, and less than anything else takes to end it."""
WITHOUT_NODES_S = 2.0
"""A router refuses a request for which no node is there after a few seconds."""
ENDLESS: Fields = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0}
DECODE_NODES = ("decode-1", "decode-2")
SALTS = itertools.count(1)
"""No two prompts begin alike."""
ROUTERS = tuple(("--request-timeout-s", str(it)) for it in (120.0, DEADLINE_S, WITHOUT_NODES_S))


def specs(tiny: Path) -> list[ClusterSpec]:
    """A handoff to nodes of one seat, a node that swaps, and prefill nodes that pull."""
    flags = ("--block-size", "16", "--num-threads", "1")
    pool = ("--kv-cache-memory", "16MiB")
    decode = (*pool, "--local-prefill-threshold", "0", "--max-num-seqs", "1")
    small = ("--kv-cache-memory", "1MiB", "--reservation-policy", "none")
    swap = ("--preemption-mode", "swap", "--swap-space", "1MiB", "--enable-priority-scheduling")
    uncached = ("--local-prefill-threshold", "0", "--no-enable-prefix-caching")
    return [
        ClusterSpec(
            name="ends",
            model=tiny,
            nodes=(
                NodeSpec("prefill-1", Role.PREFILL, (*pool, "--max-num-batched-tokens", "32")),
                *(NodeSpec(name, Role.DECODE, decode) for name in DECODE_NODES),
            ),
            flags=flags,
            routers=ROUTERS,
            can_be_slow=True,
        ),
        ClusterSpec(
            name="ends_swapped",
            model=tiny,
            nodes=(NodeSpec("mixed-1", Role.MIXED, (*small, *swap)),),
            flags=flags,
            routers=ROUTERS,
            can_be_slow=True,
        ),
        ClusterSpec(
            name="ends_pulled",
            model=demo_model_folder(),
            nodes=(
                NodeSpec("prefill-1", Role.PREFILL, environ={PATIENT: "yes"}),
                NodeSpec("prefill-2", Role.PREFILL, environ={PATIENT: "yes"}),
                NodeSpec("decode-1", Role.DECODE, uncached),
            ),
            flags=(
                *("--kv-cache-memory", "128MiB", "--max-model-len", "1024", "--num-threads", "1"),
                *("--kv-transport", "shm"),
            ),
            routers=tuple((*one, "--placement-policy", "round_robin") for one in ROUTERS),
            has_patient_routers=True,
        ),
    ]


@pytest.fixture(scope="module")
def clusters(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[dict[str, Cluster]]:
    with running(specs(tiny_model), cluster_redis, cluster_folder) as started:
        yield {cluster.spec.name: cluster for cluster in started}


# --- requests, and what a router tells of them ----------------------------------------------------


class Asked:
    """A request on a connection of its own, of which nothing is read before the end."""

    def __init__(self, url: str, fields: Fields) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        body = json.dumps({"model": "tiny", **fields}).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1",
            "Host: localhost",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.sendall("\r\n".join([*head, "", ""]).encode() + body)

    def leave(self) -> None:
        self._socket.close()

    def read_all(self) -> str:
        said = b""
        while piece := self._socket.recv(1 << 16):
            said += piece
        return said.decode()


@contextlib.contextmanager
def asked(url: str, **fields: Any) -> Iterator[Asked]:
    one = Asked(url, fields)
    try:
        yield one
    finally:
        one.leave()


def seen_by(url: str) -> Any:
    return httpx.get(f"{url}/v1/cluster", timeout=30).json()


def counted(url: str) -> dict[str, float]:
    """The requests and choices of a router by outcome, those in progress, and its known blocks."""
    names = [f"router_{it}" for it in ("choices_total", "choices_in_progress", "known_blocks")]
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        " ".join([sample.name.removeprefix("pdserve_"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.removeprefix("pdserve_") in ("requests_total", *names)
    }


# --- states ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """`fields` of a request that gets into it, and stays there once it `is_reached`."""

    fields: Fields
    is_reached: Callable[[], bool]


Reach = Callable[[Cluster, str], AbstractContextManager[State]]


def num_there(cluster: Cluster) -> int:
    books = [cluster.status(name) for name in DECODE_NODES]
    return sum(one.num_running + one.num_waiting for one in books)


@contextlib.contextmanager
def queued_at_a_full_node(cluster: Cluster, url: str) -> Iterator[State]:
    with cluster.slow(), contextlib.ExitStack() as busy:
        for number in (1, 2):
            fields = {"prompt": prompt_tokens(40, salt=next(SALTS)), **ENDLESS}
            busy.enter_context(asked(cluster.url, **fields))
            wait_until(lambda number=number: num_there(cluster) == number, "it is busy")  # type: ignore[misc]
        fields = {"prompt": prompt_tokens(40, salt=next(SALTS)), **ENDLESS}
        yield State(fields, lambda: num_there(cluster) == 3)


@contextlib.contextmanager
def without_a_decode_node(cluster: Cluster, url: str) -> Iterator[State]:
    for node in DECODE_NODES:
        cluster.processes[node].kill()
    fields = {"prompt": prompt_tokens(40, salt=next(SALTS)), **ENDLESS}
    try:
        yield State(fields, lambda: bool(seen_by(url)["router"]["num_running"]))
    finally:
        cluster.mend()


@contextlib.contextmanager
def waiting_for_its_grammar(cluster: Cluster, url: str) -> Iterator[State]:
    """The processes in which nodes try grammars stand still."""
    nodes = [cluster.processes[node.node_id] for node in cluster.spec.nodes]
    first = {"model": "tiny", "prompt": "a", "max_tokens": 4, **schemas.asked(schemas.digits(3))}
    while not all(node.children() for node in nodes):
        with cluster.slow(), contextlib.ExitStack() as both:
            for _ in DECODE_NODES:
                both.enter_context(asked(cluster.url, **first))
            wait_until(lambda: num_there(cluster) == 2, "each node has one")
    cluster.wait_seen_idle()  # Or these would be taken for the request that is to wait.
    with contextlib.ExitStack() as thawed:
        for child in [child for node in nodes for child in node.children()]:
            os.kill(child, signal.SIGSTOP)
            thawed.callback(os.kill, child, signal.SIGCONT)
        number = next(SALTS)
        fields = {"prompt": prompt_tokens(40, salt=number), "max_tokens": 300}
        fields |= schemas.asked(schemas.digits(10 + number))
        yield State(fields, lambda: any(node["num_requests"] for node in seen_by(url)["nodes"]))


@contextlib.contextmanager
def handing_off(cluster: Cluster, url: str) -> Iterator[State]:
    """The prompt has many chunks, and no further one is computed."""
    with cluster.slow(), contextlib.ExitStack() as hung:

        def is_handing_off() -> bool:
            is_there = any(cluster.status(name).blocks.receiving for name in DECODE_NODES)
            if is_there and cluster.status("prefill-1").num_transfers:
                hung.enter_context(cluster.hung("prefill-1"))
                return True
            return False

        yield State({"prompt": prompt_tokens(6000, salt=next(SALTS)), **ENDLESS}, is_handing_off)


@contextlib.contextmanager
def swapped_out(cluster: Cluster, url: str) -> Iterator[State]:
    """The pool has room for one of two; the other one has the higher priority."""
    fields: Fields = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
    first = {"prompt": prompt_tokens(1000, salt=next(SALTS)), "priority": -5, **fields}
    own = {"prompt": prompt_tokens(960, salt=next(SALTS)), "priority": 5, **fields}
    with cluster.slow(), asked(cluster.url, **first):
        yield State(own, lambda: cluster.status("mixed-1").num_host_blocks > 0)


@contextlib.contextmanager
def continued_behind_a_death(cluster: Cluster, url: str) -> Iterator[State]:
    """The node that goes on does no step."""
    killed: list[str] = []
    with contextlib.ExitStack() as after, cluster.slow(), contextlib.ExitStack() as hung:
        after.callback(cluster.mend)

        def is_continued() -> bool:
            if killed:
                return not seen_by(url)["recent_placements"][0]["decode"].startswith(*killed)
            running = [name for name in DECODE_NODES if cluster.status(name).num_running]
            for name in running:
                for other in {"prefill-1", *DECODE_NODES} - {name}:
                    hung.enter_context(cluster.hung(other))
                cluster.processes[name].kill()
            killed.extend(running)
            return False

        yield State({"prompt": prompt_tokens(40, salt=next(SALTS)), **ENDLESS}, is_continued)


@contextlib.contextmanager
def pulled_from_a_frozen_node(cluster: Cluster, url: str) -> Iterator[State]:
    before, salt = counted(url)["router_known_blocks"], next(SALTS)
    fields = {
        "model": cluster.spec.model.name,
        "prompt": [1000 + 20 * salt + i for i in range(400)],
    }
    with asked(url, max_tokens=2, **fields) as first:
        assert "200 OK" in first.read_all()
    source = seen_by(url)["recent_placements"][0]["prefill"].partition("#")[0]
    (other,) = {"prefill-1", "prefill-2"} - {source}
    wait_until(lambda: counted(url)["router_known_blocks"] >= before + 6, "its blocks are known")
    cluster.processes[source].freeze()
    try:
        yield State(fields | {"max_tokens": 400}, lambda: bool(cluster.status(other).held()))
    finally:
        cluster.processes[source].thaw()


STATES: dict[str, tuple[str, Reach]] = {
    "queued": ("ends", queued_at_a_full_node),
    "without a node": ("ends", without_a_decode_node),
    "its grammar": ("ends", waiting_for_its_grammar),
    "handed off": ("ends", handing_off),
    "continued": ("ends", continued_behind_a_death),
    "swapped out": ("ends_swapped", swapped_out),
    "pulled": ("ends_pulled", pulled_from_a_frozen_node),
}


@pytest.mark.covers("F58", "F89", "F90")
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_an_end_in_any_state_leaves_nothing(
    clusters: dict[str, Cluster], name: str, is_late: bool, is_stream: bool
) -> None:
    where, reach = STATES[name]
    cluster = clusters[where]
    cluster.wait_trusted()
    number = 0 if not is_late else 2 if name == "without a node" else 1
    url, router = cluster.urls[number], cluster.processes[f"router-{number + 1}"]
    outcome, choice = ("deadline_exceeded",) * 2 if is_late else ("client_closed", "abort")
    with reach(cluster, url) as state:
        before, logged_before = counted(url), router.log().count(f"outcome={outcome}")
        with asked(url, stream=is_stream, **state.fields) as request:
            wait_until(state.is_reached, f"the request is {name}")
            if is_late:
                assert '"code":"deadline_exceeded"' in request.read_all()
        ended = f"requests_total completions {outcome}"
        wait_until(lambda: counted(url).get(ended, 0) == before.get(ended, 0) + 1, "it is counted")
        after = counted(url)
        assert after.get(f"router_choices_total {choice}", 0) == (
            before.get(f"router_choices_total {choice}", 0) + 1
        )
        assert router.log().count(f"outcome={outcome}") == logged_before + 1
    cluster.check_settled()
    cluster.wait_seen_idle()
    assert all(counted(one)["router_choices_in_progress"] == 0 for one in cluster.urls)
