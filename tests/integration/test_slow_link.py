"""One of two decode nodes takes KV over a link that is far slower than the other's."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.nodes import Role
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.clocks.stall_free_clock import timed
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.kv.kv_relay import environ_of_endpoint
from tests.support.kv.links import Link
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

PROMPT_TOKENS = 4000
NUM_TOGETHER = 2
SLOW_PER_S = 100e3
"""Bytes; a prompt's KV takes some 20 s at this rate."""


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
    behind_link = (*decode, "--kv-port", str(link[1]))
    spec = ClusterSpec(
        name="slow_link",
        model=tiny_model,
        nodes=(
            # Short steps make short frames, which are acknowledged while the link is slow.
            NodeSpec("prefill-1", Role.PREFILL, ("--max-num-batched-tokens", "64")),
            NodeSpec("decode-1", Role.DECODE, behind_link, environ),
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


def ask_together(api: Api, salt: int) -> list[Answer]:
    """Ask for as many answers as there are decode nodes."""

    def ask(number: int) -> Answer:
        prompt = prompt_tokens(PROMPT_TOKENS, salt=NUM_TOGETHER * salt + number)
        return api.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True)

    with ThreadPoolExecutor(NUM_TOGETHER) as threads:
        return list(threads.map(ask, range(NUM_TOGETHER)))


def num_moved(cluster: Cluster) -> float:
    """The transfers that the prefill node gave up because they were slow."""
    address = cluster.record("prefill-1").metrics_address
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return sum(
        one.value
        for one in samples
        if one.name == "pdserve_kv_transfers_total" and one.labels["outcome"] == "slow"
    )


@pytest.mark.covers("F30")
@pytest.mark.endurance
def test_a_transfer_on_a_slow_link_moves_to_the_other_decode_node(
    cluster: Cluster, link: tuple[Link, int]
) -> None:
    relay = link[0]
    with Api(cluster.url, "tiny") as api:
        before = relay.num_carried
        right = ask_together(api, salt=7)
        num_bytes = relay.num_carried - before
        assert num_bytes > PROMPT_TOKENS * 100, "one of them took the link"
        allowed_s = num_bytes / SLOW_PER_S
        relay.bytes_per_s = SLOW_PER_S
        answers, took_s = timed(lambda: ask_together(api, salt=7))
        assert answers == right
        assert num_moved(cluster) == 1
        assert took_s < allowed_s / 2, f"{took_s:.1f} s, {allowed_s:.1f} s on the link"
        relay.mend()
        # The pair is used again, after a pause.
        salts = count(8)

        def is_used() -> bool:
            before = relay.num_carried
            ask_together(api, next(salts))
            return relay.num_carried - before > PROMPT_TOKENS * 100

        wait_until(is_used, "the link is used again", timeout_s=90.0)
