"""Nodes and routers that leave under load: no request fails, and every answer is the usual one."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.nodes import Role
from pdserve.local_cluster.child_process import ending_with_parent
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.books import Books
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.cluster.processes import role_environment
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.grammars import schemas
from tests.support.models.tiny_model import prompt_tokens

pytestmark = pytest.mark.endurance

GREEDY: Fields = {"temperature": 0, "ignore_eos": True}
SAMPLED: Fields = {"temperature": 1.0, "ignore_eos": True}
DIGITS = schemas.digits(450)
WAYS = (
    GREEDY,
    SAMPLED,
    {"temperature": 0, **schemas.asked(DIGITS)},
    {"temperature": 1.0, **schemas.asked(DIGITS)},
)
DRAIN_S = 120.0
SHORT_DRAIN_S = 0.3
LONG = 1500
"""Tokens: they take more than a minute while nodes are slow."""
NUM_CLIENTS = 4
SOON_S = 60.0
"""How soon whoever has nothing to do any more is gone: long before its time to drain is over."""


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> ClusterSpec:
    """Two of each role and two routers; `decode-2` hands over almost at once."""
    drain = ("--drain-timeout-s", str(DRAIN_S))
    short = ("--drain-timeout-s", str(SHORT_DRAIN_S))
    local = ("--local-prefill-threshold", "0")
    return ClusterSpec(
        name="draining",
        model=tiny_model,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL, ("--max-num-batched-tokens", "32", *drain)),
            NodeSpec("prefill-2", Role.PREFILL, ("--max-num-batched-tokens", "32", *drain)),
            NodeSpec("decode-1", Role.DECODE, (*local, *drain)),
            NodeSpec("decode-2", Role.DECODE, (*local, *short)),
        ),
        flags=SMALL_NODES,
        # In turn, so that each decode node gets its share whatever it has in its cache.
        routers=(("--placement-policy", "round_robin", *drain),) * 2,
        can_be_slow=True,
        has_patient_routers=True,
    )


class Load:
    """Clients that ask one thing after another until they are told to stop."""

    def __init__(self, api: Api, *, length: int, max_tokens: int) -> None:
        self._api = api
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(NUM_CLIENTS)
        self._fields: list[Fields] = [
            {
                "prompt": prompt_tokens(length + 7 * i, salt=60 + i),
                "max_tokens": max_tokens,
                "seed": i,
                **SAMPLED,
            }
            for i in range(NUM_CLIENTS)
        ]
        self.wanted = [api.complete(**fields) for fields in self._fields]
        self.num_asked = 0
        self._running = [self._threads.submit(self._ask, i) for i in range(NUM_CLIENTS)]

    def _ask(self, i: int) -> list[Answer | ApiFailure]:
        answers: list[Answer | ApiFailure] = []
        while not self._is_over.is_set():
            answers += self._api.complete_all([self._fields[i]])
            self.num_asked += 1
        return answers

    def wait_asked(self, more: int) -> None:
        """Return when so many more requests have ended."""
        enough = self.num_asked + more
        wait_until(lambda: self.num_asked >= enough, f"{more} more requests", timeout_s=60.0)

    def end(self) -> None:
        """Fails unless every answer was the usual one."""
        self._is_over.set()
        for asking, wanted in zip(self._running, self.wanted, strict=True):
            answers = asking.result(timeout=100)
            assert answers
            assert [a for a in answers if a != wanted] == []
        self._threads.shutdown()


class Answers:
    """Long answers that are asked for at once, so that each decode node runs some of them.

    Every second pair of them follows a schema, whose matcher the next node makes again.
    """

    number = 8

    def __init__(self, api: Api) -> None:
        self._api = api
        self._fields: list[Fields] = [
            {
                "prompt": prompt_tokens(20 + 30 * i, salt=70 + i),
                "max_tokens": LONG,
                "seed": i,
                **WAYS[i % len(WAYS)],
            }
            for i in range(self.number)
        ]
        self._threads = ThreadPoolExecutor(self.number)
        self._wanted = [api.complete(**fields) for fields in self._fields]
        self._asked: list[Future[Answer]] = []

    def start(self) -> None:
        self._asked = [self._threads.submit(self._api.complete, **f) for f in self._fields]

    def end(self) -> None:
        """Fails unless every answer was the usual one."""
        for fields, wanted in zip(self._fields, self._wanted, strict=True):
            if "structured_outputs" in fields:
                schemas.check(wanted, DIGITS)
        assert [asked.result(timeout=100) for asked in self._asked] == self._wanted
        self._threads.shutdown()


@pytest.fixture
def answers(api: Api) -> Answers:
    return Answers(api)


def runs_some(status: Books) -> bool:
    return status.blocks.running > 0 and status.num_running > 0


def drain(api: Api, node_id: str) -> httpx.Response:
    return api.http.post("/v1/cluster/drain", json={"node_id": node_id})


def only(cluster: Cluster, node_id: str) -> None:
    """Every router chooses this decode node alone: the other one has left."""
    other = {"decode-1": "decode-2", "decode-2": "decode-1"}[node_id]
    assert cluster.processes[other].interrupt() == 0
    wait_until(
        lambda: all(other not in cluster.chosen_nodes(url) for url in cluster.urls),
        f"{other} is not chosen any more",
    )


def test_what_runs_on_a_decode_node_that_drains_is_finished_there(
    cluster: Cluster, api: Api, answers: Answers
) -> None:
    with cluster.slow():
        answers.start()
        cluster.wait_status("decode-1", runs_some, "runs some")
        reply = drain(api, "decode-1")
        assert reply.status_code == 200, reply.text
        assert reply.json() == {
            "node_id": "decode-1",
            "epoch": cluster.record("decode-1").incarnation.epoch,
            "is_draining": True,
            "drain_timeout_s": DRAIN_S,
        }
        assert runs_some(cluster.status("decode-1"))
        # New work is done elsewhere meanwhile.
        assert api.complete(prompt_tokens(30, salt=51), max_tokens=4, **GREEDY).tokens
        assert placements(api)[0]["decode"].startswith("decode-2#")
    answers.end()
    assert cluster.processes["decode-1"].wait(SOON_S) == 0
    assert all(placement["attempt"] == 1 for placement in placements(api)[: answers.number])


def test_what_is_left_at_the_time_out_goes_on_elsewhere_with_the_same_tokens(
    cluster: Cluster, api: Api, answers: Answers
) -> None:
    with cluster.slow():
        answers.start()
        cluster.wait_status("decode-2", runs_some, "runs some")
        process = cluster.processes["decode-2"]
        process.begin_stop()
        assert process.wait(SOON_S) == 0
    answers.end()
    moved = [placement for placement in placements(api) if placement["attempt"] == 2]
    assert moved, "everything had ended before"
    assert all(placement["decode"].startswith("decode-1#") for placement in moved)


def test_a_decode_node_that_is_killed_is_not_noticed_either(
    cluster: Cluster, api: Api, answers: Answers
) -> None:
    with cluster.slow():
        answers.start()
        cluster.wait_status("decode-2", runs_some, "runs some")
        cluster.processes["decode-2"].kill()
    answers.end()
    assert [placement for placement in placements(api) if placement["attempt"] == 2]


@pytest.mark.covers("F115")
def test_a_prefill_node_drains_under_load_and_nobody_notices(cluster: Cluster, api: Api) -> None:
    load = Load(api, length=300, max_tokens=20)
    for node_id in ("prefill-1", "prefill-2"):
        load.wait_asked(4)
        assert drain(api, node_id).status_code == 200
        assert cluster.processes[node_id].wait(DRAIN_S) == 0
        load.wait_asked(4)
        cluster.mend()
    load.end()


def test_decode_nodes_drain_one_after_the_other_under_load(cluster: Cluster, api: Api) -> None:
    load = Load(api, length=60, max_tokens=400)
    for node_id in ("decode-2", "decode-1"):
        load.wait_asked(2)
        cluster.processes[node_id].begin_stop()
        assert cluster.processes[node_id].wait(DRAIN_S) == 0
        load.wait_asked(2)
        cluster.mend()
    load.end()


def test_answers_of_the_last_decode_node_wait_for_the_next_one(cluster: Cluster, api: Api) -> None:
    only(cluster, "decode-2")
    fields: Fields = {"prompt": prompt_tokens(30, salt=56), "max_tokens": LONG, **GREEDY}
    with api.stream(logprobs=0, **fields) as stream:
        with cluster.slow():
            stream.read_tokens(3)
            cluster.processes["decode-2"].begin_stop()
            assert cluster.processes["decode-2"].wait(DRAIN_S) == 0
        cluster.mend()
        rest = stream.read_rest()
    assert rest == api.complete(**fields)


@pytest.mark.covers("T21")
def test_a_router_that_drains_lets_its_streams_end(cluster: Cluster, api: Api) -> None:
    fields: Fields = {"prompt": prompt_tokens(40, salt=57), "max_tokens": LONG, **GREEDY}
    wanted = api.complete(**fields)
    process = cluster.processes["router-1"]
    with httpx.Client(base_url=cluster.url, timeout=10.0) as probe:
        assert probe.get("/ready").status_code == 200
        with api.stream(logprobs=0, **fields) as stream:
            with cluster.slow():
                stream.read_tokens(3)
                process.begin_stop()
                wait_until(lambda: not is_listening(cluster.url), "takes no new connection")
            assert stream.read_rest() == wanted
    assert process.wait(SOON_S) == 0
    with Api(cluster.urls[1], "tiny") as other:
        assert other.complete(**fields) == wanted


def test_an_idle_process_ends_soon(cluster: Cluster) -> None:
    for name in ("decode-1", "prefill-1", "router-2"):
        process = cluster.processes[name]
        process.begin_stop()
        assert process.wait(SOON_S) == 0, name


def test_a_second_signal_ends_a_node_at_once(cluster: Cluster, api: Api) -> None:
    only(cluster, "decode-1")
    process = cluster.processes["decode-1"]
    with cluster.slow(), api.stream(prompt=prompt_tokens(9), max_tokens=LONG, **GREEDY) as stream:
        stream.read_tokens(3)
        process.begin_stop()
        # Two signals at once would be one.
        wait_until(lambda: "decode-1" in draining_nodes(api), "decode-1 drains")
        process.begin_stop()
        assert process.wait(SOON_S) == 0


def test_the_command_waits_until_the_node_is_gone(cluster: Cluster, api: Api) -> None:
    done = pdserve("drain", "prefill-2", "--url", cluster.url, "--wait")
    assert done.returncode == 0, done.stderr
    assert "prefill-2 takes nothing new; what runs has 120 s to finish" in done.stdout
    assert "prefill-2 is gone after" in done.stdout
    assert cluster.processes["prefill-2"].wait(SOON_S) == 0
    unknown = pdserve("drain", "prefill-9", "--url", cluster.url)
    assert unknown.returncode == 1
    assert "there is no node 'prefill-9': the nodes are decode-1" in unknown.stderr


def test_a_watched_status_ends_with_ctrl_c(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "pdserve", "status", "--watch", "--url", cluster.url]
    with subprocess.Popen(
        ending_with_parent(command), stdout=subprocess.PIPE, text=True, env=role_environment()
    ) as watching:
        assert watching.stdout is not None
        titles = 0
        while titles < 3:
            titles += "4 nodes serving tiny" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(SOON_S) == 0


def draining_nodes(api: Api) -> set[str]:
    """As the router has heard it."""
    nodes = api.http.get("/v1/cluster").json()["nodes"]
    return {node["node_id"] for node in nodes if node["is_draining"]}


def placements(api: Api) -> list[dict[str, Any]]:
    """The latest first."""
    recent: list[dict[str, Any]] = api.http.get("/v1/cluster").json()["recent_placements"]
    return recent


def is_listening(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5.0)
    except httpx.TransportError:
        return False
    return True


def pdserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve", *arguments],
        capture_output=True,
        text=True,
        env=role_environment(),
        timeout=60,
        check=False,
    )
