"""More requests than seats, more tokens than blocks: all are answered, and answered right."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.nodes import Role
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.models.tiny_model import prompt_tokens

BLOCK_SIZE = 16
NUM_SEATS = 2
SMALL_POOL = ("--block-size", str(BLOCK_SIZE), "--num-threads", "1", "--kv-cache-memory", "1MiB")


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> ClusterSpec:
    """The decode node has two seats, and too few blocks for two long answers."""
    seats = ("--max-num-seqs", str(NUM_SEATS), "--local-prefill-threshold", "20")
    return ClusterSpec(
        name="small",
        model=tiny_model,
        nodes=(NodeSpec("prefill-1", Role.PREFILL), NodeSpec("decode-1", Role.DECODE, seats)),
        flags=SMALL_POOL,
    )


def answers_alone(api: Api, requests: list[Fields]) -> list[Answer | ApiFailure]:
    return [api.complete(**request) for request in requests]


def test_a_full_cluster_answers_everybody(api: Api) -> None:
    # Short prompts, which the decode node prefills itself, among those that are handed off.
    ways: list[Fields] = [{"temperature": 0}, {"temperature": 0.9, "seed": 3}]
    requests: list[Fields] = [
        {"prompt": prompt_tokens(8 + 11 * i, salt=21), "max_tokens": 120, "ignore_eos": True, **way}
        for i in range(6)
        for way in ways
    ]
    together = api.complete_all(requests)
    assert together == answers_alone(api, requests)


@pytest.mark.covers("F46")
def test_preempted_answers_are_the_same(cluster: Cluster, api: Api) -> None:
    num_blocks = cluster.status("decode-1").num_blocks
    num_tokens = 80 * BLOCK_SIZE
    assert NUM_SEATS * num_tokens > num_blocks * BLOCK_SIZE > num_tokens, "two do not fit, one does"
    ways: list[Fields] = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 9},
        {"temperature": 0.7, "seed": 10, "repetition_penalty": 1.1},
    ]
    common: Fields = {"max_tokens": num_tokens - 64, "ignore_eos": True}
    requests: list[Fields] = [
        {"prompt": prompt_tokens(64, salt=22 + i), **common, **way} for i, way in enumerate(ways)
    ]
    together = api.complete_all(requests)
    assert together == answers_alone(api, requests)


def test_a_prompt_larger_than_the_pool_is_refused_in_words(cluster: Cluster, api: Api) -> None:
    num_tokens = cluster.status("decode-1").num_blocks * BLOCK_SIZE
    with pytest.raises(ApiFailure) as failure:
        api.complete(prompt_tokens(num_tokens + 1), max_tokens=1)
    error = failure.value.error
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert str(num_tokens + 1) in error.message
