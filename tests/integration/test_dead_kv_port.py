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
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.cluster.topologies import relayed_spec
from tests.support.kv.links import Link
from tests.support.models.tiny_model import prompt_tokens

TOGETHER = range(8)
ONE_BY_ONE = range(8, 48)
STALL_S = 1.5
"""Less than the 2 s after which a transfer is called slow, and much more than an answer takes."""


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    with closing(Link(free_loopback_port())) as link:
        yield link


@pytest.fixture(scope="module")
def spec(tiny_model: Path, link: Link, tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    folder = tmp_path_factory.mktemp("at_start")
    other = NodeSpec("decode-2", Role.DECODE, ("--local-prefill-threshold", "0"))
    return relayed_spec("dead_kv_port", tiny_model, link, folder, other)


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
    cluster: Cluster, api: Api, link: Link
) -> None:
    """At most one more of those that follow tries the pair again meanwhile."""
    right = [ask(api, salt) for salt in (*TOGETHER, *ONE_BY_ONE)]
    assert link.num_carried > 0, "some of them took the link"
    link.cut()
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
    link.mend()

    def is_used() -> bool:
        before = link.num_carried
        ask_together(api, [next(salts) for _ in TOGETHER])
        return link.num_carried - before > 1000 * len(TOGETHER)

    wait_until(is_used, "KV goes to the port again", timeout_s=90.0)
    wait_until(lambda: silent_to_prefill(cluster) == [], "it is not told any more")
