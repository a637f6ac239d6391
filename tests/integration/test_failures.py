"""Processes die, freeze and come back, Redis too: prompt typed errors, and nothing stays held.

Each test puts back what it broke, and ends with the closing check on the whole cluster.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from common.ids import Incarnation
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import make_envelope
from router.dispatch.placement_recorder import TTL_S
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.books import Books
from tests.support.cluster.cluster import Cluster, running
from tests.support.cluster.topologies import handoff_spec
from tests.support.grammars import schemas
from tests.support.models.tiny_model import prompt_tokens, token_id
from tests.support.stores.redis_server import RedisServer, redis_server
from tests.support.stores.refusing_redis import Spoil, failed_snapshot, full_memory, mend

GREEDY: Fields = {"temperature": 0, "ignore_eos": True}
COUNTED: Fields = {
    "temperature": 1,
    "seed": 6,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.4,
    "logit_bias": {str(token_id("e")): 2, str(token_id(" ")): 1},
    "bad_words": ["ab", "c"],
    "min_tokens": 150,
    "stop_token_ids": [token_id("e")],
    "stop": ["f"],
}
"""Depends on the tokens that were drawn before, and on how many there were."""
LONG_PROMPT = 2400
ENDLESS = 12_000
PROMPT_S = 40.0
"""How soon a request must end after the node that held it fell silent: before its deadline."""
EXPIRED = -2
"""What Redis answers to PTTL of a key that has gone since the keys were listed."""


@pytest.fixture(scope="module")
def own_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def _fragile_cluster(
    own_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[Cluster]:
    with running([handoff_spec("fragile", tiny_model)], own_redis, cluster_folder) as (cluster,):
        yield cluster


@pytest.fixture
def cluster(_fragile_cluster: Cluster) -> Iterator[Cluster]:
    _fragile_cluster.mend()
    yield _fragile_cluster
    _fragile_cluster.wait_ready()
    _fragile_cluster.check_settled()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def started_prefill(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor, salt: int, max_tokens: int = 8
) -> Future[Answer]:
    """A request whose long prompt the prefill node is in the middle of.

    It takes seconds. A test that stands still for longer finds it computed.
    """
    cluster.wait_trusted()
    num_before = cluster.status("prefill-1").num_steps
    prompt = prompt_tokens(LONG_PROMPT, salt=salt)
    answer = threads.submit(api.complete, prompt, max_tokens=max_tokens, **GREEDY)
    cluster.wait_status("prefill-1", lambda now: now.num_steps > num_before, "runs the prompt")
    return answer


def fails_soon(call: Callable[[], object], *codes: str) -> None:
    """The call ends in time with a typed error that has one of these codes."""
    started_at_s = time.monotonic()
    with pytest.raises(ApiFailure) as failure:
        call()
    assert time.monotonic() - started_at_s < PROMPT_S
    error = failure.value.error
    assert error.code in codes, error
    assert error.kind == "server_error"
    assert error.status in (200, 502, 503), error


def test_a_prefill_node_that_dies_costs_time_and_no_answer(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor
) -> None:
    other: Fields = {"prompt": prompt_tokens(50, salt=31), "max_tokens": 200, **GREEDY}
    with api.stream(logprobs=0, **other) as undisturbed:
        with cluster.slow():
            undisturbed.read_tokens(3)
            moved = started_prefill(cluster, api, threads, salt=32)
            cluster.processes["prefill-1"].kill()
        # Nothing of it was emitted: the decode node computes the prompt itself.
        answer = moved.result(timeout=60)
        rest = undisturbed.read_rest()
    assert api.complete(prompt_tokens(30, salt=33), max_tokens=4, **GREEDY).finish_reason
    cluster.mend()
    assert answer == api.complete(prompt_tokens(LONG_PROMPT, salt=32), max_tokens=8, **GREEDY)
    assert rest == api.complete(**other)


@pytest.mark.covers("F143")
def test_answers_of_a_decode_node_that_dies_go_on_in_its_next_life(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor
) -> None:
    old_life = cluster.record("decode-1")
    fields: Fields = {"prompt": prompt_tokens(40, salt=34), "max_tokens": 200, **GREEDY}
    digits = schemas.digits(60)
    ruled: Fields = {"prompt": prompt_tokens(45, salt=34), "max_tokens": 240, "temperature": 1}
    ruled |= {"seed": 5, **schemas.asked(digits)}
    counted: Fields = {"prompt": prompt_tokens(42, salt=34), "max_tokens": 240, **COUNTED}
    with (
        api.stream(logprobs=0, **fields) as stream,
        api.stream(logprobs=0, **ruled) as ruled_stream,
        api.stream(logprobs=0, **counted) as counted_stream,
    ):
        with cluster.slow():
            stream.read_tokens(3)
            ruled_stream.read_tokens(3)
            counted_stream.read_tokens(3)
            handed_off = started_prefill(cluster, api, threads, salt=35)
            cluster.processes["decode-1"].kill()
        # A request that is still placed there waits for its next life, as those that run do.
        wait_until(
            lambda: "decode-1" not in cluster.chosen_nodes(cluster.url), "decode-1 is not chosen"
        )
        fails_soon(lambda: api.complete(prompt_tokens(9), max_tokens=2), "overloaded")
        # The prefill node lets go of the transfer although nobody is left to acknowledge anything.
        cluster.wait_status("prefill-1", holds_nothing, "holds nothing")
        cluster.mend()
        rest, moved = stream.read_rest(), handed_off.result(timeout=60)
        ruled_rest, counted_rest = ruled_stream.read_rest(), counted_stream.read_rest()
    assert rest == api.complete(**fields)
    assert counted_rest == api.complete(**counted)
    assert counted_rest.finish_reason == "stop"
    assert 150 < len(counted_rest.tokens) < 240
    assert ruled_rest == api.complete(**ruled)
    schemas.check(ruled_rest, digits)
    assert moved == api.complete(prompt_tokens(LONG_PROMPT, salt=35), max_tokens=8, **GREEDY)
    new_life = cluster.record("decode-1")
    assert new_life.control_address == old_life.control_address
    assert new_life.incarnation.epoch > old_life.incarnation.epoch
    envelope = make_envelope(Incarnation("router-1", 1), old_life.incarnation)
    with grpc.insecure_channel(new_life.control_address) as channel:
        stub = pb_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as refused:
            stub.Drain(pb.DrainRequest(envelope=envelope), timeout=60.0)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.covers("F83")
def test_a_router_that_dies_takes_its_own_requests_with_it(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor
) -> None:
    fields: Fields = {"prompt": prompt_tokens(50, salt=36), "max_tokens": 200, **GREEDY}
    with (
        Api(cluster.urls[1], "tiny") as other,
        other.stream(logprobs=0, **fields) as undisturbed,
        api.stream(prompt=prompt_tokens(40, salt=37), max_tokens=ENDLESS, **GREEDY) as cut_off,
    ):
        with cluster.slow():
            undisturbed.read_tokens(3)
            cut_off.read_tokens(3)
            lost = started_prefill(cluster, api, threads, salt=38, max_tokens=ENDLESS)
            cluster.processes["router-1"].kill()
        with pytest.raises(httpx.TransportError):
            cut_off.read_rest()
        with pytest.raises(httpx.TransportError):
            lost.result(timeout=PROMPT_S)
        rest = undisturbed.read_rest()
        for node_id in ("prefill-1", "decode-1"):
            cluster.wait_status(node_id, holds_nothing, "holds nothing")
        assert rest == other.complete(**fields)
    forget_placements_of(cluster, "router-1")
    cluster.mend()


@pytest.mark.covers("F119")
def test_a_client_that_connects_before_the_router_serves_is_answered(
    cluster: Cluster, threads: ThreadPoolExecutor
) -> None:
    """Its port is open from its start: it must know its nodes before it takes a request."""
    fields = {"model": "tiny", "prompt": prompt_tokens(40, salt=91), "max_tokens": 8, **GREEDY}
    replies: list[httpx.Response] = []

    def is_answered() -> bool:
        try:
            reply = httpx.post(f"{cluster.url}/v1/completions", json=fields, timeout=60.0)
        except httpx.ConnectError:
            return False
        replies.append(reply)
        return True

    cluster.processes["router-1"].kill()
    asking = threads.submit(wait_until, is_answered, "the router is connected to")
    cluster.mend()
    asking.result(timeout=60)
    (reply,) = replies
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 8), reply.text


def test_answers_of_a_frozen_decode_node_go_on_when_it_comes_back(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor
) -> None:
    frozen = cluster.processes["decode-1"]
    fields: Fields = {"prompt": prompt_tokens(40, salt=39), "max_tokens": 200, **GREEDY}
    with api.stream(logprobs=0, **fields) as stream:
        with cluster.slow():
            stream.read_tokens(3)
            handed_off = started_prefill(cluster, api, threads, salt=40)
            frozen.freeze()
        try:
            cluster.wait_status("prefill-1", holds_nothing, "holds nothing")
            wait_until(lambda: "decode-1" not in cluster.chosen_nodes(cluster.url), "given up")
        finally:
            frozen.thaw()
        rest, moved = stream.read_rest(), handed_off.result(timeout=60)
    cluster.wait_ready()
    assert rest == api.complete(**fields)
    assert moved == api.complete(prompt_tokens(LONG_PROMPT, salt=40), max_tokens=8, **GREEDY)


def test_a_frozen_prefill_node_is_given_up_and_comes_back(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor
) -> None:
    frozen = cluster.processes["prefill-1"]
    with cluster.slow():
        moved = started_prefill(cluster, api, threads, salt=41)
        frozen.freeze()
    try:
        answer = moved.result(timeout=60)
    finally:
        frozen.thaw()
    cluster.wait_ready()
    assert answer == api.complete(prompt_tokens(LONG_PROMPT, salt=41), max_tokens=8, **GREEDY)


def test_answers_of_a_decode_node_that_is_stopped_go_on_in_its_next_life(
    cluster: Cluster, api: Api
) -> None:
    fields: Fields = {"prompt": prompt_tokens(40, salt=42), "max_tokens": 200, **GREEDY}
    with api.stream(logprobs=0, **fields) as stream:
        with cluster.slow():
            stream.read_tokens(3)
            assert cluster.processes["decode-1"].interrupt() == 0
        assert "node:decode-1" not in " ".join(own_keys(cluster)), "it has left the store"
        cluster.mend()
        rest = stream.read_rest()
    assert rest == api.complete(**fields)


@pytest.mark.covers("F80")
@pytest.mark.endurance
def test_a_router_that_stood_still_loses_no_stream(
    cluster: Cluster, api: Api, threads: ThreadPoolExecutor
) -> None:
    """Its nodes cut all its streams after 10 s of silence."""
    fields: list[Fields] = [
        {"prompt": prompt_tokens(30 + i, salt=46), "max_tokens": 1500, **GREEDY} for i in range(4)
    ]
    router = cluster.processes["router-1"]
    with contextlib.ExitStack() as open_streams, Api(cluster.url, "tiny") as other:
        streams = [open_streams.enter_context(api.stream(logprobs=0, **one)) for one in fields]
        with cluster.slow():
            for stream in streams:
                stream.read_tokens(3)
            router.freeze()
            try:
                for node_id in ("decode-1", "prefill-1"):
                    cluster.wait_status(node_id, holds_nothing, "has cut the router off")
                asking = threads.submit(other.complete, prompt_tokens(9), max_tokens=2, **GREEDY)
            finally:
                router.thaw()
            assert asking.result(timeout=PROMPT_S).usage["completion_tokens"] == 2
        rest = [stream.read_rest() for stream in streams]
    assert rest == api.complete_all(fields)


@pytest.mark.covers("F72")
def test_requests_go_on_while_redis_is_away_and_after_it_comes_back_empty(
    cluster: Cluster, api: Api, own_redis: RedisServer
) -> None:
    fields: Fields = {"prompt": prompt_tokens(50, salt=43), "max_tokens": 200, **GREEDY}
    with api.stream(logprobs=0, **fields) as stream:
        with cluster.slow():
            stream.read_tokens(3)
            own_redis.kill()
        rest = stream.read_rest()
    # New requests find their nodes in the router's own copy, whether it has noticed or not.
    assert rest == api.complete(**fields)
    wait_until(
        lambda: api.http.get("/v1/cluster").json()["placement_store"] == "away",
        "the router notices that the store is away",
    )
    assert api.complete(prompt_tokens(60, salt=44), max_tokens=5, **GREEDY).tokens
    own_redis.start()
    cluster.wait_ready()
    assert rest == api.complete(**fields)


@pytest.mark.covers("F73")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (full_memory, "OOM|maxmemory"),
        pytest.param(failed_snapshot, "not able to persist", marks=pytest.mark.endurance),
    ],
)
def test_a_redis_that_refuses_writes_takes_no_node_away(
    spoil: Spoil, words: str, cluster: Cluster, api: Api, own_redis: RedisServer
) -> None:
    """Full memory or a full disk: every lease ends, and no node can renew its own."""
    fields: Fields = {"prompt": prompt_tokens(50, salt=46), "max_tokens": 40, **GREEDY}
    wanted = api.complete(**fields)
    with own_redis.client() as client:
        spoil(client, own_redis)
        try:
            unlisted = "2 nodes are heard that the placement store does not list (decode-1#"
            wait_until(lambda: unlisted in api.http.get("/ready").text, "the router says it")
            assert cluster.live_nodes() == []
            assert api.http.get("/ready").status_code == 200
            assert api.complete(**fields) == wanted
        finally:
            mend(client, own_redis)
    for node_id in ("decode-1", "prefill-1"):
        not_renewed = rf"not renewed \(failure 1\), serving on: Redis refused a call: .*({words})"
        assert re.search(not_renewed, cluster.processes[node_id].log())
    wait_until(lambda: "warnings" not in api.http.get("/ready").json(), "all is well")


def test_processes_that_start_while_redis_is_away_wait_for_it(
    cluster: Cluster, api: Api, own_redis: RedisServer
) -> None:
    own_redis.kill()
    router, node = cluster.processes["router-1"], cluster.processes["decode-1"]
    for process in (router, node):
        process.kill()
        process.start()

    def why_not_ready() -> str:
        with contextlib.suppress(httpx.TransportError):
            return str(api.http.get("/ready").json().get("reason"))
        return ""

    wait_until(lambda: "placement store is away" in why_not_ready(), "the router waits")
    wait_until(lambda: "waiting for the placement store" in node.log(), "the node waits")
    router.require_running()
    node.require_running()
    own_redis.start()
    cluster.wait_ready()
    assert api.complete(prompt_tokens(40, salt=47), max_tokens=5, **GREEDY).tokens


def test_requests_that_run_together_fail_apart(cluster: Cluster, api: Api) -> None:
    """A client that hangs up in the middle of a batch disturbs nobody in it."""
    fields: list[Fields] = [
        {"prompt": prompt_tokens(30 + i, salt=45), "max_tokens": 200, **GREEDY} for i in range(6)
    ]
    wanted = [api.complete(**request) for request in fields]
    has_to_leave = threading.Event()

    def leave_early() -> None:
        prompt = prompt_tokens(70, salt=46)
        with api.stream(prompt=prompt, max_tokens=ENDLESS, **GREEDY) as stream:
            stream.read_tokens(20)
            has_to_leave.wait(PROMPT_S)

    with ThreadPoolExecutor(2) as leavers:
        with cluster.slow():
            leaving = [leavers.submit(leave_early) for _ in range(2)]
            cluster.wait_status("decode-1", lambda status: status.num_running == 2, "runs both")
            has_to_leave.set()
        assert api.complete_all(fields) == wanted
        for leaver in leaving:
            leaver.result(timeout=PROMPT_S)


def holds_nothing(books: Books) -> bool:
    return not books.held()


def own_keys(cluster: Cluster) -> list[str]:
    return cluster.store.keys(cluster.store.prefix(cluster.spec.name))


def forget_placements_of(cluster: Cluster, router_id: str) -> None:
    """What time does: nobody renews a dead router's records. Another router takes its own away."""
    with cluster.store.client() as client:
        for key in own_keys(cluster):
            is_record = ":placement:" in key
            if is_record and f'"{router_id}"'.encode() not in (client.get(key) or b""):
                continue
            if ":placement" in key:
                left_ms = client.pttl(key)
                assert left_ms == EXPIRED or 0 < left_ms <= 1000 * TTL_S
                client.delete(key)
