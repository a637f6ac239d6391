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
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.cluster.topologies import relayed_spec
from tests.support.kv.links import Link
from tests.support.models.tiny_model import prompt_tokens

PROMPT_TOKENS = 4000
NUM_TOGETHER = 2
SLOW_PER_S = 100e3
"""Bytes; a prompt's KV takes some 20 s at this rate."""


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    with closing(Link(free_loopback_port())) as link:
        yield link


@pytest.fixture(scope="module")
def spec(tiny_model: Path, link: Link, tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    folder = tmp_path_factory.mktemp("at_start")
    other = NodeSpec("decode-2", Role.DECODE, ("--local-prefill-threshold", "0"))
    return relayed_spec("slow_link", tiny_model, link, folder, other)


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
    cluster: Cluster, api: Api, link: Link
) -> None:
    before = link.num_carried
    right = ask_together(api, salt=7)
    num_bytes = link.num_carried - before
    assert num_bytes > PROMPT_TOKENS * 100, "one of them took the link"
    allowed_s = num_bytes / SLOW_PER_S
    link.bytes_per_s = SLOW_PER_S
    answers, took_s = timed(lambda: ask_together(api, salt=7))
    assert answers == right
    assert num_moved(cluster) == 1
    assert took_s < allowed_s / 2, f"{took_s:.1f} s, {allowed_s:.1f} s on the link"
    link.mend()
    # The pair is used again, after a pause.
    salts = count(8)

    def is_used() -> bool:
        before = link.num_carried
        ask_together(api, next(salts))
        return link.num_carried - before > PROMPT_TOKENS * 100

    wait_until(is_used, "the link is used again", timeout_s=90.0)
