"""Prefill on one GPU, decode on another: the same answers as one node on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.nodes import Role
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.cluster.api import Api, Fields
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.stores.redis_server import RedisServer

pytestmark = [pytest.mark.two_gpu, pytest.mark.timeout(600)]

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "A prefill node computes prompts, and a decode node produces tokens. " * 20
FLAGS = ("--kv-cache-memory", "512MiB")


def num_gpus() -> int:
    """What a process with this environment's Paddle can use; asked in one of its own."""
    ask = "import paddle; print(paddle.device.cuda.device_count())"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ask], capture_output=True, text=True, check=False
    )
    return int(ended.stdout.split()[-1]) if ended.returncode == 0 else 0


@pytest.fixture(scope="module")
def gpus() -> list[str]:
    """Two devices, as CUDA_VISIBLE_DEVICES names them."""
    found = num_gpus()
    if found < 2:
        pytest.skip(f"this machine has {found} GPUs that Paddle can use: wanted 2")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (shown.split(",") if shown else [str(i) for i in range(found)])[:2]


@pytest.fixture(scope="module")
def clusters(
    gpus: list[str], cluster_redis: RedisServer, cluster_folder: Path
) -> Iterator[list[Cluster]]:
    first, second = ({"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus)
    one = (NodeSpec("mixed-1", Role.MIXED, environ=first),)
    apart = (
        NodeSpec("prefill-1", Role.PREFILL, environ=first),
        NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0"), environ=second),
    )
    specs = [
        ClusterSpec(name=name, model=demo_model_folder(), nodes=nodes, flags=FLAGS)
        for name, nodes in (("one_gpu", one), ("two_gpus", apart))
    ]
    with running(specs, cluster_redis, cluster_folder) as started:
        yield started


def test_two_gpus_answer_as_one(clusters: list[Cluster]) -> None:
    requests: list[Fields] = [
        {"prompt": PROMPT[: 150 * i], "max_tokens": 32, "ignore_eos": True, **way}
        for i in (1, 3, 9)
        for way in ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
    ]
    with Api(clusters[0].url, MODEL) as one, Api(clusters[1].url, MODEL) as two:
        wanted = [one.complete(**request) for request in requests]
        assert [two.complete(**request) for request in requests] == wanted
    for cluster in clusters:
        cluster.check_settled()
