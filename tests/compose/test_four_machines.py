"""One compose file per role, on four machines: here on four addresses of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.local_cluster.free_ports import free_loopback_port
from tests.compose.cluster import MODEL, Cluster
from tests.compose.load import ask, prompts
from tests.compose.project import COMPOSE, Project

ADDRESSES = tuple(f"127.0.1.{number}" for number in range(1, 5))
ROLES = (("redis", "router", "balancer"), ("prefill",), ("decode",), ("decode",))
KERNELS = Path(__file__).parent / "compose.test.yaml"


@pytest.fixture
def machines(project: Project, keys: Path) -> Iterator[list[Project]]:
    """Provide one project for each machine, with its own address. They are removed at the end."""
    found = []
    for number, (address, roles) in enumerate(zip(ADDRESSES, ROLES, strict=True), start=1):
        settings = {
            **project.settings,
            "HOST_ADDRESS": address,
            "REDIS_ADDRESS": ADDRESSES[0],
            "LISTEN": f"{ADDRESSES[0]}:{free_loopback_port()}",
            "ROUTER_1": f"{ADDRESSES[0]}:8001",
            "ROUTER_2": f"{ADDRESSES[0]}:8001",
            "CLUSTER": "four",
        }
        files = [COMPOSE / f"compose.host-{role}.yaml" for role in roles]
        name = f"pdserve-test-machine-{number}"
        found.append(Project(project.engine, name, [*files, KERNELS], settings))
    try:
        for machine in found:
            machine.remove()
        yield found
    finally:
        for machine in found:
            machine.remove()


def test_a_cluster_is_spread_over_four_machines(machines: list[Project], keys: Path) -> None:
    cluster = Cluster(machines[0], keys)
    machines[0].run("up", "--detach", "--no-build")
    # A router without nodes is not ready, and answers so itself.
    machines[0].wait_until("the router is reached", lambda: cluster.status("/v1/models") == 200)
    assert cluster.status("/ready") == 503
    for machine, (role,) in zip(machines[1:], ROLES[1:], strict=True):
        machine.run("up", "--detach", "--no-build")
        machine.wait_until_healthy(role, 1)
    for role in ROLES[0]:
        machines[0].wait_until_healthy(role, 1)
    machines[0].wait_until(
        "every node is known", lambda: cluster.num_nodes() == {"prefill": 1, "decode": 2}
    )
    addresses = {str(node["address"]) for node in cluster.nodes()}
    assert addresses == {"127.0.1.2:9000", "127.0.1.3:9010", "127.0.1.4:9010"}
    with cluster.client() as client:
        answers = [ask(client, MODEL, prompt) for prompt in prompts()]
    assert all(answers)
    (prefill,) = machines[1].running("prefill")
    assert cluster.blocks(prefill)["cached"] > 0
