"""Nodes whose pool is far too small for what they are asked: slower, and the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.nodes import Role
from tests.support.cluster.api import Answer, Api, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.grammars import schemas
from tests.support.models.tiny_model import prompt_tokens, token_id
from tests.support.stores.redis_server import RedisServer

# 128 blocks of 16 tokens: one request of 1,100 tokens fits, and no two do: any two requests
# that overlap for long enough preempt, also when a busy machine sends them slowly.
SMALL = ("--kv-cache-memory", "1MiB", "--reservation-policy", "none")
BLOCK_SIZE = 16
NUM_TURNS = 3
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
    flags = ("--block-size", str(BLOCK_SIZE), "--num-threads", "1")
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


@pytest.mark.covers("F51", "F61")
@pytest.mark.parametrize(("name", "node"), [("swap", "decode-1"), ("recompute", "mixed-1")])
def test_turns_that_share_blocks_answer_the_same_while_others_hang_up(
    clusters: dict[str, Cluster], tiny_cluster: Cluster, tiny_api: Api, name: str, node: str
) -> None:
    """Turns go on behind answers too, whose blocks hold accepted and refused drafts."""
    cluster, turns = clusters[name], first_turns()
    num_before = cluster.status(node).num_preemptions
    with (
        Api(cluster.url, "tiny") as api,
        ThreadPoolExecutor(len(turns)) as threads,
    ):
        for _ in range(NUM_TURNS):
            wanted = tiny_api.complete_all(turns)
            left = [threads.submit(leave, api, turn["prompt"]) for turn in turns[::2]]
            assert api.complete_all(turns) == wanted
            for one in left:
                one.result()
            turns = next_turns(turns, wanted)
    for settled in (cluster, tiny_cluster):
        settled.check_settled()
    books = cluster.status(node)
    assert books.num_preemptions > num_before
    assert (books.num_drafted > 0) == (name == "swap")


def first_turns() -> list[Fields]:
    """Prompts that begin alike up to the border of a block, or to a token beside it."""
    shared = prompt_tokens(97, salt=82)
    lengths = (1, 15, 16, 17, 31, 32, 33, 95, 96, 97)
    return [
        {
            "prompt": [*shared[:length], *prompt_tokens(1 + length % 3, salt=length)],
            "max_tokens": 240 + number,
            "temperature": 0.8 * (number % 2),
            "seed": number,
            "priority": number % 3,
            "logprobs": 0,
            "ignore_eos": True,
        }
        for number, length in enumerate(lengths)
    ]


def next_turns(turns: list[Fields], answers: list[Answer | ApiFailure]) -> list[Fields]:
    """Turns behind the answers, which are cut at the border of a block or a token beside it."""
    found = []
    for number, (turn, answer) in enumerate(zip(turns, answers, strict=True)):
        assert isinstance(answer, Answer)
        whole = [*turn["prompt"], *(token_id(token) for token in answer.tokens)]
        length = len(whole) // BLOCK_SIZE * BLOCK_SIZE - 1 + number % 3
        found.append(turn | {"prompt": whole[:length]})
    return found


def leave(api: Api, prompt: list[int]) -> None:
    """Read a few tokens of an answer, and hang up."""
    fields: Fields = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}
    with api.stream(prompt=prompt, **fields) as stream:
        stream.read_tokens(3)
