"""Nodes whose pool is far too small for what they are asked: slower, and the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.nodes import Role
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.grammars import schemas
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

# 128 blocks of 16 tokens: one request of 1,100 tokens fits, and no two do: any two requests
# that overlap for long enough preempt, also when a busy machine sends them slowly.
SMALL = ("--kv-cache-memory", "1MiB", "--reservation-policy", "none")
DIGITS = schemas.digits(140)
REQUESTS: list[Fields] = [
    {
        "prompt": prompt_tokens(40 + 3 * i, salt=81),
        "max_tokens": 1100,
        "temperature": 0.8 * (i % 2),
        "seed": i,
        "priority": i % 3,
        "logprobs": 0,
        **(schemas.asked(DIGITS) if i % 5 > 2 else {"ignore_eos": True}),
    }
    for i in range(6)
]


@pytest.fixture(scope="module")
def clusters(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[dict[str, Cluster]]:
    """A handoff that swaps and looks drafts up, and a mixed node that recomputes."""
    flags = ("--block-size", "16", "--num-threads", "1")
    swap = ("--preemption-mode", "swap", "--swap-space", "1MiB", "--speculative-method", "ngram")
    recompute = ("--enable-priority-scheduling", "--preemption-policy", "shortest_output")
    specs = [
        ClusterSpec(
            name="swap",
            model=tiny_model,
            nodes=(
                NodeSpec("prefill-1", Role.PREFILL, ("--kv-cache-memory", "16MiB")),
                NodeSpec("decode-1", Role.DECODE, (*SMALL, *swap)),
            ),
            flags=flags,
        ),
        ClusterSpec(
            name="recompute",
            model=tiny_model,
            nodes=(NodeSpec("mixed-1", Role.MIXED, (*SMALL, *recompute)),),
            flags=flags,
        ),
    ]
    with running(specs, cluster_redis, cluster_folder) as both:
        yield {cluster.spec.name: cluster for cluster in both}


@pytest.fixture(scope="module")
def wanted(_shared_tiny_cluster: Cluster) -> list[Answer | ApiFailure]:
    """What every request answers where the pool has room for all of them."""
    with Api(_shared_tiny_cluster.url, "tiny") as api:
        answers = api.complete_all(REQUESTS)
    _shared_tiny_cluster.check_settled()
    return answers


@pytest.mark.parametrize(("name", "node"), [("swap", "decode-1"), ("recompute", "mixed-1")])
def test_a_pool_too_small_answers_the_same(
    clusters: dict[str, Cluster], wanted: list[Answer | ApiFailure], name: str, node: str
) -> None:
    cluster = clusters[name]
    with Api(cluster.url, "tiny") as api:
        answers = api.complete_all(REQUESTS)
    assert answers == wanted
    for fields, answer in zip(REQUESTS, answers, strict=True):
        if "structured_outputs" in fields:
            assert isinstance(answer, Answer)
            schemas.check(answer, DIGITS)
    cluster.check_settled()
    assert cluster.status(node).num_preemptions > 0
