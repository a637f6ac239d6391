"""Prefill on one GPU, decode on another: the same answers as one node on one GPU.

KV goes from card to card, and through the rings in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.nodes import Role
from engine.runner.gpu.cuda_driver import LEAST_CAPABILITY, capability_of, load_driver
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.cluster.api import Api, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.stores.redis_server import RedisServer

pytestmark = [pytest.mark.two_gpu, pytest.mark.timeout(600)]

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "A prefill node computes prompts, and a decode node produces tokens. " * 20
FLAGS = ("--attention-backend", "triton", "--kv-cache-memory", "512MiB")


@pytest.fixture(scope="module")
def two_gpus() -> None:
    """Skip unless the driver shows two cards that the kernels run on."""
    try:
        driver = load_driver()
    except ConfigError as error:
        pytest.skip(str(error))
    found = [capability_of(driver, ordinal) for ordinal in range(2)]
    if min(found) < LEAST_CAPABILITY:
        pytest.skip(f"the first two GPUs have compute capabilities {found}, 0 where there is none")


@pytest.fixture(scope="module")
def clusters(
    two_gpus: None, cluster_redis: RedisServer, cluster_folder: Path
) -> Iterator[list[Cluster]]:
    first, second = ("--gpus", "0"), ("--gpus", "1")
    one = (NodeSpec("mixed-1", Role.MIXED, first),)
    apart = (
        NodeSpec("prefill-1", Role.PREFILL, first),
        NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0", *second)),
    )
    kinds = {"one_gpu": (one, "auto"), "between_cards": (apart, "auto"), "rings": (apart, "zmq")}
    specs = [
        ClusterSpec(
            name=name, model=demo_model_folder(), nodes=nodes,
            flags=(*FLAGS, "--kv-transport", transport),
        )
        for name, (nodes, transport) in kinds.items()
    ]  # fmt: skip
    with running(specs, cluster_redis, cluster_folder) as started:
        yield started


def test_two_gpus_answer_as_one(clusters: list[Cluster]) -> None:
    requests: list[Fields] = [
        {"prompt": PROMPT[: 150 * i], "max_tokens": 32, "ignore_eos": True, **way}
        for i in (1, 3, 9)
        for way in ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
    ]
    answers = []
    for cluster in clusters:
        with Api(cluster.url, MODEL) as api:
            answers.append([api.complete(**request) for request in requests])
        cluster.check_settled()
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
