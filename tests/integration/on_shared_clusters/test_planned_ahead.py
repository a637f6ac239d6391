"""Nodes that plan a step while the one before it runs answer what others do: real processes.

The reference is the shared cluster of the tiny model: on a CPU it plans steps one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.nodes import Role
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.models.tiny_model import FIRST_BYTE_ID, VOCAB_SIZE, prompt_tokens
from tests.support.stores.redis_server import RedisServer

NUM_SEATS = 4
ENDLESS = 9000
"""Output tokens that no test waits for."""
LEAST_OUTPUT = 12
STOP_TOKEN_IDS = list(range(FIRST_BYTE_ID, VOCAB_SIZE, 5))
"""One token in five: an output that may end is soon over."""

WAYS: tuple[Fields, ...] = (
    {"temperature": 0, "max_tokens": 60, "ignore_eos": True},
    {"temperature": 0.8, "max_tokens": 60, "ignore_eos": True, "top_p": 0.9},
    {"temperature": 0.8, "max_tokens": 60, "repetition_penalty": 1.1, "stop": ["a", "7", "Q"]},
    {"temperature": 0, "max_tokens": 60, "stop_token_ids": STOP_TOKEN_IDS},
    {
        "temperature": 0.8,
        "max_tokens": 60,
        "stop_token_ids": STOP_TOKEN_IDS,
        "min_tokens": LEAST_OUTPUT,
    },
    {"temperature": 0, "max_tokens": 1, "ignore_eos": True},
)
LENGTHS = (5, 16, 40, 90)


def requests() -> list[Fields]:
    """Many more than there are seats. Prompts repeat themselves, so that drafts are found."""
    return [
        {"prompt": prompt_tokens(length, salt=61 + i) * 3, "seed": i, **way}
        for length in LENGTHS
        for i, way in enumerate(WAYS)
    ]


@pytest.fixture(scope="module")
def wanted(_shared_tiny_cluster: Cluster) -> list[Answer | ApiFailure]:
    """What every request answers where steps follow one another."""
    with Api(_shared_tiny_cluster.url, "tiny") as api:
        answers = api.complete_all(requests())
    _shared_tiny_cluster.check_settled()
    for node in _shared_tiny_cluster.spec.nodes:
        assert _shared_tiny_cluster.status(node.node_id).num_planned_ahead == 0
    return answers


@pytest.fixture(scope="module")
def clusters(
    cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path
) -> Iterator[dict[str, Cluster]]:
    """A handoff without drafts, and a mixed node that looks drafts up."""
    ahead = ("--async-scheduling", "on", "--max-num-seqs", str(NUM_SEATS))
    step = ("--max-num-batched-tokens", "64")
    specs = [
        ClusterSpec(
            name="ahead",
            model=tiny_model,
            nodes=(
                NodeSpec("prefill-1", Role.PREFILL, step),
                NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0")),
            ),
            flags=(*SMALL_NODES, *ahead),
        ),
        ClusterSpec(
            name="ahead_drafts",
            model=tiny_model,
            nodes=(NodeSpec("mixed-1", Role.MIXED, (*step, "--speculative-method", "ngram")),),
            flags=(*SMALL_NODES, *ahead),
        ),
    ]
    with running(specs, cluster_redis, cluster_folder) as both:
        yield {cluster.spec.name: cluster for cluster in both}


def leave(api: Api, salt: int) -> None:
    """Read a few tokens of an answer that would be long, and hang up."""
    fields: Fields = {"temperature": 0, "max_tokens": ENDLESS, "ignore_eos": True}
    with api.stream(prompt=prompt_tokens(30, salt=salt), **fields) as stream:
        stream.read_tokens(3)


def test_the_ways_to_end_all_occur(wanted: list[Answer | ApiFailure]) -> None:
    answers = [answer for answer in wanted if isinstance(answer, Answer)]
    assert len(answers) == len(wanted)
    by_way = [answers[i :: len(WAYS)] for i in range(len(WAYS))]
    reasons = [{answer.finish_reason for answer in way} for way in by_way]
    assert reasons[0] == reasons[1] == reasons[5] == {"length"}
    assert "stop" in reasons[2]
    assert "stop" in reasons[3]
    lengths = [answer.usage["completion_tokens"] for answer in by_way[4]]
    assert reasons[4] == {"stop"}
    assert LEAST_OUTPUT < min(lengths) <= max(lengths) < 60
    assert min(answer.usage["completion_tokens"] for answer in by_way[3]) < LEAST_OUTPUT


@pytest.mark.covers("F146")
@pytest.mark.parametrize(("name", "node"), [("ahead", "decode-1"), ("ahead_drafts", "mixed-1")])
def test_the_answers_are_those_of_steps_that_follow_one_another(
    clusters: dict[str, Cluster], wanted: list[Answer | ApiFailure], name: str, node: str
) -> None:
    cluster = clusters[name]
    with Api(cluster.url, "tiny") as api, ThreadPoolExecutor(NUM_SEATS) as threads:
        left = [threads.submit(leave, api, salt) for salt in range(81, 81 + 2 * NUM_SEATS)]
        assert api.complete_all(requests()) == wanted
        for one in left:
            one.result()
        # Once more, with every full block of the prompts in the prefix cache.
        assert api.complete_all(requests()) == wanted
    cluster.check_settled()
    books = cluster.status(node)
    assert (books.num_drafted > 0) == (name == "ahead_drafts")
    assert books.num_planned_ahead > 0
