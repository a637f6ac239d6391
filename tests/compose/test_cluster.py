"""A cluster in containers is scaled, drained and broken under load, and no request fails.

Each test leaves two prefill and two decode nodes, whose blocks are free or cached.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from pathlib import Path

import httpx
import pytest
from docker.models.containers import Container
from openai import AuthenticationError, OpenAI

from tests.compose.cluster import MODEL, NODES, ROUTERS, Cluster
from tests.compose.load import ask, prompts, steady_load
from tests.support.commands import CommandFailed, run

SERVICES = (*NODES, *ROUTERS, "balancer", "redis")


def test_openais_client_gets_its_answer_through_the_balancer(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Once upon a time"}],
        max_tokens=8,
        stream=True,
    )
    assert any(choice.delta.content for chunk in stream for choice in chunk.choices)


def test_prompts_are_handed_from_prefill_to_decode(cluster: Cluster, client: OpenAI) -> None:
    for prompt in prompts():
        ask(client, MODEL, prompt)
    for service in NODES:
        cached = [cluster.blocks(node)["cached"] for node in cluster.project.running(service)]
        assert sum(cached) >= len(prompts()), f"{service} nodes have {cached} blocks in their cache"


def test_a_stream_is_not_held_back(cluster: Cluster) -> None:
    """The balancer forwards each event at once and does not collect them."""
    body = {"model": MODEL, "prompt": prompts()[0], "max_tokens": 100}
    body |= {"stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {cluster.key('api')}"}
    url = f"{cluster.url}/v1/completions"
    typical = []
    for _ in range(9):
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60.0) as reply:
            typical.append(statistics.median(len(piece) for piece in reply.iter_raw()))
    # Events have some 180 bytes, and a few may arrive together. A buffer would hold 4 KiB or more.
    # An answer that is read late arrives in few pieces, hence the median of several answers.
    assert statistics.median(typical) < 2048


def test_a_request_without_a_valid_key_is_refused(cluster: Cluster) -> None:
    stranger = OpenAI(base_url=f"{cluster.url}/v1", api_key="pds_wrong", max_retries=0)
    with stranger, pytest.raises(AuthenticationError):
        stranger.models.list()


def test_every_port_refuses_a_client_without_keys(cluster: Cluster) -> None:
    network = f"{cluster.project.name}_cluster"
    image = cluster.project.settings["NODE_IMAGE"]
    script = (Path(__file__).parent / "stranger.py").read_text(encoding="utf-8")
    said = cluster.engine.client.containers.run(
        image, ["-c", script], entrypoint="python", network=network, remove=True
    )
    found = dict(line.split(": ", 1) for line in said.decode().splitlines())
    refusals = {
        "router": "401",
        "router metrics": "401",
        "prefill metrics": "401",
        "decode metrics": "401",
        "prefill in clear": "no connection",
        "decode in clear": "no connection",
        # A node that took this peer would send its settings at once.
        "prefill without certificate": "^0 bytes$|certificate required",
        "decode without certificate": "^0 bytes$|certificate required",
        "redis without password": "Authentication required",
        "redis in clear": "^ConnectionError",
        "kv without curve": "^HANDSHAKE_FAILED|^DISCONNECTED|^silence",
        "silent connections": "^256 open$",
    }
    assert found.keys() == refusals.keys(), said
    for name, refusal in refusals.items():
        assert re.search(refusal, found[name], re.IGNORECASE), f"{name}: {found[name]}"


def test_only_the_balancer_is_reached_from_outside(cluster: Cluster) -> None:
    for service in SERVICES:
        for container in cluster.project.running(service):
            published = container.attrs["HostConfig"]["PortBindings"]
            assert bool(published) == (service == "balancer"), service


@pytest.mark.parametrize("service", SERVICES)
def test_containers_are_not_root_and_cannot_write(cluster: Cluster, service: str) -> None:
    (container, *_) = cluster.project.running(service)
    host = container.attrs["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert cluster.project.execute(container, "id", "-u").strip() == "10001"
    with pytest.raises(CommandFailed, match="Read-only file system"):
        cluster.project.execute(container, "sh", "-c", "echo > /opt/x")


@pytest.mark.covers("F96")
def test_decode_nodes_come_and_go_under_load(cluster: Cluster, client: OpenAI) -> None:
    began_at_s = time.time()
    with steady_load(client, MODEL) as load:
        cluster.scale("decode", 3)
        load.goes_on()
        cluster.scale("decode", 2)
        load.goes_on()
    assert cluster.project.exit_codes("decode", began_at_s) == [0]


@pytest.mark.covers("F115")
def test_a_prefill_node_drains_under_load(cluster: Cluster, client: OpenAI) -> None:
    leaving = cluster.project.running("prefill")[0]
    with steady_load(client, MODEL) as load:
        node_id = cluster.node_id(leaving)
        drain = [sys.executable, "-m", "pdserve", "drain", node_id, "--url", cluster.url]
        run([*drain, "--api-key-file", str(cluster.key_file("admin"))], limit_s=60.0)
        cluster.wait_until_routers_know({"prefill": 1, "decode": 2})
        load.goes_on()
        # Drained, it stays until somebody stops it: the engine would restart what ends.
        assert status(leaving) == "running"
        leaving.stop()
        assert status(leaving) == "exited"
        assert leaving.attrs["State"]["ExitCode"] == 0
        cluster.bring_up()
        load.goes_on()


@pytest.mark.covers("F72")
def test_redis_dies_and_comes_back_under_load(cluster: Cluster, client: OpenAI) -> None:
    (redis,) = cluster.project.running("redis")
    epochs = cluster.epochs()
    with steady_load(client, MODEL) as load:
        redis.kill()
        load.goes_on()
        redis.start()
        cluster.project.wait_until_healthy("redis", 1)
        cluster.wait_until_routers_know(cluster.counts)
        load.goes_on()
    assert cluster.epochs() == epochs, "a node began a new life"
    assert b"NOPERM" not in redis.logs(), "it left out a part of its own file"


def test_the_balancer_reads_its_certificate_again(cluster: Cluster) -> None:
    """With the command of compose.https.yaml: a new worker takes over, the container goes on."""
    (balancer,) = cluster.project.running("balancer")
    cluster.project.execute(balancer, "sh", "-c", "kill -HUP 1")
    cluster.project.wait_until(
        "a second worker", lambda: balancer.logs().count(b"New worker") == 2, limit_s=30.0
    )
    cluster.project.wait_until("an answer", lambda: cluster.status("/v1/models") == 200)
    assert status(balancer) == "running"


def test_routers_are_replaced_one_after_the_other_under_load(
    cluster: Cluster, client: OpenAI
) -> None:
    before = {router: cluster.project.running(router)[0].id for router in ROUTERS}
    with steady_load(client, MODEL) as load:
        for router in ROUTERS:
            up = ("up", "--detach", "--no-build", "--no-deps", "--force-recreate")
            cluster.project.run(*up, router)
            cluster.project.wait_until_healthy(router, 1)
            load.goes_on()
    after = {router: cluster.project.running(router)[0].id for router in ROUTERS}
    assert not set(before.values()) & set(after.values())


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_a_node_that_dies_restarts_and_loses_only_its_cache(
    cluster: Cluster, client: OpenAI, service: str
) -> None:
    dying = cluster.project.running(service)[0]
    node_id = cluster.node_id(dying)
    epoch = cluster.epochs()[node_id]
    with steady_load(client, MODEL) as load:
        cluster.kill(dying)
        cluster.project.wait_until(
            "it is back in a new life", lambda: cluster.epochs().get(node_id, epoch) > epoch
        )
        cluster.bring_up()
        load.goes_on()
    dying.reload()
    assert dying.attrs["RestartCount"] == 1


def status(container: Container) -> str:
    """Return what the engine says of the container now."""
    container.reload()
    return str(container.status)
