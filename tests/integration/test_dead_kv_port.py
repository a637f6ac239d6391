"""A decode node whose KV port answers nobody, while everything else of it lives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from common.nodes import Role
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.clocks.stall_free_clock import timed
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.kv.kv_relay import environ_of_endpoint
from tests.support.kv.links import Link
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

TOGETHER = range(8)
ONE_BY_ONE = range(8, 48)
STALL_S = 1.5
"""Less than the 2 s after which a transfer is called slow, and much more than an answer takes."""


@pytest.fixture(scope="module")
def link() -> Iterator[tuple[Link, int]]:
    """It, and the port that it carries to."""
    kv_port = free_loopback_port()
    with closing(Link(kv_port)) as link:
        yield link, kv_port


@pytest.fixture(scope="module")
def cluster(
    link: tuple[Link, int],
    cluster_redis: RedisServer,
    cluster_folder: Path,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    environ = environ_of_endpoint(tmp_path_factory.mktemp("at_start"), link[0].endpoint)
    decode = ("--local-prefill-threshold", "0")
    spec = ClusterSpec(
        name="dead_kv_port",
        model=tiny_model,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL),
            NodeSpec("decode-1", Role.DECODE, (*decode, "--kv-port", str(link[1])), environ),
            NodeSpec("decode-2", Role.DECODE, decode),
        ),
        flags=(
            *("--block-size", "16", "--num-threads", "1", "--kv-cache-memory", "16MiB"),
            *("--kv-transport", "zmq", "--no-enable-prefix-caching"),
        ),
    )
    with running([spec], cluster_redis, cluster_folder) as (cluster,):
        yield cluster
        cluster.check_settled()


def ask(api: Api, salt: int) -> Answer:
    return api.complete(prompt_tokens(60, salt=salt), max_tokens=8, temperature=0, ignore_eos=True)


def ask_together(api: Api, salts: Sequence[int]) -> list[Answer]:
    with ThreadPoolExecutor(len(salts)) as threads:
        return list(threads.map(lambda salt: ask(api, salt), salts))


def seconds_of(api: Api, salt: int, right: Answer) -> float:
    """Ask, compare, and return how long it took."""
    answer, took_s = timed(lambda: ask(api, salt))
    assert answer == right
    return took_s


def silent_to_prefill(cluster: Cluster) -> list[str]:
    """The decode nodes that the prefill node does not reach, as it tells itself: routers show the
    pairs that they avoid as well."""
    (prefill,) = (one for one in cluster.live_nodes() if one.record.node_id == "prefill-1")
    return [decode.node_id for decode in prefill.load.kv_unreachable]


@pytest.mark.covers("F30", "F81")
@pytest.mark.endurance
def test_those_on_their_way_wait_once_and_later_ones_do_not(
    cluster: Cluster, link: tuple[Link, int]
) -> None:
    """At most one more of those that follow tries the pair again meanwhile."""
    relay = link[0]
    with Api(cluster.url, "tiny") as api:
        right = [ask(api, salt) for salt in (*TOGETHER, *ONE_BY_ONE)]
        assert relay.num_carried > 0, "some of them took the link"
        relay.cut()
        answers, together_s = timed(lambda: ask_together(api, TOGETHER))
        assert answers == right[: len(TOGETHER)]
        assert together_s > STALL_S, "none of them was on its way to the dead port"
        assert together_s < 2 * DEFAULT_PEER_TIMEOUT_S, "one of them waited twice"
        spans_s = [seconds_of(api, salt, right[salt]) for salt in ONE_BY_ONE]
        assert sum(span_s > STALL_S for span_s in spans_s) <= 1, spans_s
        salts = count(len(right))

        def is_told() -> bool:
            ask(api, next(salts))
            return silent_to_prefill(cluster) == ["decode-1"]

        wait_until(is_told, "the prefill node tells that it does not reach it", timeout_s=60.0)
        relay.mend()

        def is_used() -> bool:
            before = relay.num_carried
            ask_together(api, [next(salts) for _ in TOGETHER])
            return relay.num_carried - before > 1000 * len(TOGETHER)

        wait_until(is_used, "KV goes to the port again", timeout_s=90.0)
        wait_until(lambda: silent_to_prefill(cluster) == [], "it is not told any more")
