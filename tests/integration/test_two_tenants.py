"""Two tenants with equal prompts on a cluster of real processes: who gets whose KV."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.nodes import Role
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.stores.redis_server import RedisServer

MODES = ("key", "none", "all")
"""What the routers share, in their order. The first one has the default."""
SESSION = {"x-session-id": "a-name-that-both-use"}
FOUND = {
    "/v1/completions": 112,
    "/v1/chat/completions": 128,
    "/v1/responses": 128,
    "/v1/messages": 128,
}
"""The tokens of full blocks in a prompt of each endpoint: a chat's has a few more."""
BLOCK_SIZE = 16
POOL_TOKENS = (1 << 20) // 512
"""The tokens that a node's KV cache of 1 MiB holds: one of the tiny model has 512 bytes."""


def spec(model: Path, keys: Path) -> ClusterSpec:
    return ClusterSpec(
        name="tenants",
        model=model,
        keys=keys,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL, ("--prefix-host-memory", "4MiB")),
            NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0")),
        ),
        flags=(
            *("--block-size", str(BLOCK_SIZE), "--num-threads", "1", "--kv-cache-memory", "1MiB"),
            *("--kv-transport", "zmq"),
        ),
        routers=((), *(("--prefix-sharing", mode) for mode in MODES[1:])),
        has_patient_routers=True,
    )


@pytest.fixture(scope="module")
def _cluster(
    keyed_redis: RedisServer, cluster_folder: Path, tiny_model: Path, keys: Path
) -> Iterator[Cluster]:
    with running([spec(tiny_model, keys)], keyed_redis, cluster_folder) as (cluster,):
        yield cluster


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    yield _cluster
    _cluster.check_settled()


class Tenants:
    """The clients of two keys."""

    def __init__(self, cluster: Cluster, mode: str = MODES[0]) -> None:
        assert cluster.spec.keys is not None
        folder = cluster.spec.keys / "client"
        self.keys = [(folder / name).read_text() for name in ("api.key", "admin.key")]
        self.url = cluster.urls[MODES.index(mode)]

    def cached(self, tenant: int, path: str, prompt: str, **fields: Any) -> int:
        """The tokens of the prompt that the answer says were cached."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"} | SESSION
        body = {"model": "tiny", "temperature": 0} | asked(path, prompt) | fields
        reply = httpx.post(self.url + path, json=body, headers=headers, timeout=60.0)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        if path == "/v1/messages":
            return int(usage["cache_read_input_tokens"])
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"])


def asked(path: str, prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {
        "/v1/completions": {"prompt": prompt, "max_tokens": 2},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
        "/v1/responses": {"input": prompt, "max_output_tokens": 2},
        "/v1/messages": {"messages": messages, "max_tokens": 2},
    }[path]


def text(name: str, length: int = 120) -> str:
    """A prompt of so many tokens; one of another name differs from the first block on."""
    return "".join(random.Random(name).choices(string.ascii_letters, k=length))


def sample(cluster: Cluster, node_id: str, pattern: str) -> float:
    """The sum of the samples of a node whose lines begin with `pattern`."""
    assert cluster.spec.keys is not None
    token = (cluster.spec.keys / "client/metrics.token").read_text()
    url = f"http://{cluster.record(node_id).metrics_address}/metrics"
    shown = httpx.get(url, headers={"authorization": f"Bearer {token}"}).text
    return sum(map(float, re.findall(rf"^{pattern}\S* (\S+)$", shown, re.MULTILINE)))


@pytest.mark.covers("K04")
@pytest.mark.parametrize("path", FOUND)
def test_a_tenant_finds_nothing_of_another_one(cluster: Cluster, path: str) -> None:
    prompt, tenants = text(f"key{path}"), Tenants(cluster)
    assert [tenants.cached(0, path, prompt) for _ in range(2)] == [0, FOUND[path]]
    assert [tenants.cached(1, path, prompt) for _ in range(2)] == [0, FOUND[path]]
    assert tenants.cached(1, path, prompt, cache_salt="of my own") == 0


@pytest.mark.covers("K04")
@pytest.mark.parametrize("path", FOUND)
def test_with_none_not_even_a_tenants_own_request(cluster: Cluster, path: str) -> None:
    prompt, tenants = text(f"none{path}"), Tenants(cluster, "none")
    assert [tenants.cached(0, path, prompt) for _ in range(3)] == [0, 0, 0]


@pytest.mark.covers("K04")
@pytest.mark.parametrize("path", FOUND)
def test_with_all_every_request_that_has_no_salt(cluster: Cluster, path: str) -> None:
    prompt, tenants = text(f"all{path}"), Tenants(cluster, "all")
    assert [tenants.cached(tenant, path, prompt) for tenant in (0, 1)] == [0, FOUND[path]]
    salted = [tenants.cached(tenant, path, prompt, cache_salt="s") for tenant in (0, 1)]
    assert salted == [0, FOUND[path]]
    assert tenants.cached(0, path, prompt, cache_salt="t") == 0


def test_nothing_of_another_tenant_is_pulled(cluster: Cluster) -> None:
    """The decode node has the answers of earlier turns; whose, its ticket says to nobody else."""
    tenants, path = Tenants(cluster), "/v1/completions"
    first = text("pulled")
    considered = "pdserve_prefix_pulls_total"

    def turn(tenant: int, prompt: str) -> float:
        """How many pulls a turn of a tenant made the prefill node think of."""
        before = sample(cluster, "prefill-1", considered)
        tenants.cached(tenant, path, prompt)
        return sample(cluster, "prefill-1", considered) - before

    headers = {"authorization": f"Bearer {tenants.keys[0]}"} | SESSION
    body = {"model": "tiny", "prompt": first, "max_tokens": 60, "ignore_eos": True, "seed": 1}
    reply = httpx.post(tenants.url + path, json=body, headers=headers, timeout=60.0)
    said = first + reply.json()["choices"][0]["text"] + "And then?"
    assert turn(1, said) == 0
    assert turn(0, said) == 1


def test_nothing_of_another_tenant_is_copied_back_from_host_memory(cluster: Cluster) -> None:
    tenants, path, prompt = Tenants(cluster), "/v1/completions", text("host")
    host = r'pdserve_prefix_blocks_found_total\{tier="host"\}'
    assert [tenants.cached(0, path, prompt) for _ in range(2)] == [0, 112]
    for number in range(12):
        for _ in range(2):
            tenants.cached(0, path, text(f"fill{number}", POOL_TOKENS // 4))
    before = sample(cluster, "prefill-1", host)
    assert tenants.cached(1, path, prompt) == 0
    assert sample(cluster, "prefill-1", host) == before
    assert tenants.cached(0, path, prompt) == 112
    assert sample(cluster, "prefill-1", host) > before


def test_routers_know_what_is_in_host_memory(cluster: Cluster) -> None:
    """There are more than all pools together hold."""
    num_blocks = len(cluster.spec.nodes) * POOL_TOKENS // BLOCK_SIZE
    tenants, number = Tenants(cluster), 100

    def fill() -> bool:
        nonlocal number
        number += 1
        for _ in range(2):
            tenants.cached(0, "/v1/completions", text(f"fill{number}", POOL_TOKENS // 4))
        return known_blocks(cluster) > num_blocks + POOL_TOKENS // 4 // BLOCK_SIZE

    wait_until(fill, "blocks of host memory are reported")


def known_blocks(cluster: Cluster) -> float:
    """What the first router knows of blocks."""
    assert cluster.spec.keys is not None
    token = (cluster.spec.keys / "client/metrics.token").read_text()
    shown = httpx.get(f"{cluster.url}/metrics", headers={"authorization": f"Bearer {token}"}).text
    return float(re.findall(r"^pdserve_router_known_blocks (\S+)$", shown, re.MULTILINE)[0])
