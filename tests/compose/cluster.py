"""The launched project as a cluster: who is in it, what its nodes hold, how it is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.compose.load import REQUEST_LIMIT_S
from tests.compose.project import Container, Project

NODES = ("prefill", "decode")
ROUTERS = ("router-1", "router-2")
MODEL = "tiny"
BOOKS_LIMIT_S = 60.0

# Run inside a container: the metrics' port is nowhere else to be reached, and wants the token.
_READ_METRICS = """
import os, urllib.request
address = os.environ["PDSERVE_HOST"] + ":" + os.environ["PDSERVE_METRICS_PORT"]
token = open("/keys/metrics.token").read()
header = {"Authorization": f"Bearer {token}"}
request = urllib.request.Request(f"http://{address}/metrics", headers=header)
print(urllib.request.urlopen(request, timeout=5).read().decode())
"""

# Run inside a router: the balancer asks whichever of them it likes.
_READ_NODES = """
import os, sys, urllib.request
address = os.environ["PDSERVE_HOST"] + ":" + os.environ["PDSERVE_PORT"]
header = {"Authorization": f"Bearer {sys.argv[1]}"}
request = urllib.request.Request(f"http://{address}/v1/cluster", headers=header)
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""

# All of the container but its process 1, which only waits for the one that does the work.
_KILL = "kill -9 -1 || true"


class Cluster:
    """Routers behind their balancer, nodes and Redis, as containers of one project."""

    def __init__(self, project: Project, keys: Path) -> None:
        self.project = project
        self.engine = project.engine
        self.counts = {"prefill": 2, "decode": 2}
        self._keys = keys
        self.url = f"http://{project.settings['LISTEN']}"

    def key(self, name: str) -> str:
        """`api` or `admin`, in clear."""
        return (self._keys / "client" / f"{name}.key").read_text()

    @contextmanager
    def client(self) -> Iterator[OpenAI]:
        """OpenAI's client as people use it, but for its habit to hide failures by retrying."""
        with OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key("api"),
            max_retries=0,
            timeout=REQUEST_LIMIT_S,
        ) as client:
            yield client

    def launch(self) -> None:
        """Bring up what is not up. One node first where kernels must be compiled: they share it."""
        self.project.run("up", "--detach", "--no-build", "decode")
        self.project.wait_until_healthy("decode", 1)
        self.bring_up()

    def bring_up(self) -> None:
        """As many nodes as `counts` says, and all else; returns when all are in the cluster."""
        scale = [f"--scale={service}={count}" for service, count in self.counts.items()]
        self.project.run("up", "--detach", "--no-build", "--no-recreate", *scale)
        for service, count in self.counts.items():
            self.project.wait_until_healthy(service, count)
        for router in ROUTERS:
            self.project.wait_until_healthy(router, 1)
        self.project.wait_until_healthy("balancer", 1)
        self.wait_until_routers_know(self.counts)

    def scale(self, service: str, count: int) -> None:
        """Change how many nodes of a kind there are, as `docker compose up --scale` does."""
        self.counts[service] = count
        self.bring_up()

    def status(self, path: str) -> int:
        """What a GET through the balancer is answered with; 0: not at all."""
        reply = self._get(path)
        return 0 if reply is None else reply.status_code

    def nodes(self) -> list[dict[str, object]]:
        """The nodes that a router lists; empty while none answers."""
        reply = self._get("/v1/cluster")
        return list(reply.json()["nodes"]) if reply is not None and reply.is_success else []

    def _get(self, path: str) -> httpx.Response | None:
        headers = {"Authorization": f"Bearer {self.key('api')}"}
        try:
            return httpx.get(f"{self.url}{path}", headers=headers, timeout=10.0)
        except httpx.HTTPError:
            return None

    def node_id(self, container: Container) -> str:
        """The id that a node gave itself: it has the container's host name."""
        (found,) = (
            str(node["node_id"])
            for node in self.nodes()
            if container.hostname in str(node["node_id"])
        )
        return found

    def epochs(self) -> dict[str, int]:
        """Which life each node is in."""
        return {str(node["node_id"]): int(str(node["epoch"])) for node in self.nodes()}

    def kill(self, container: Container) -> None:
        """End the process inside with SIGKILL, as the kernel does when memory is out.

        `docker kill` would not do: the engine takes that for the operator's wish.
        """
        self.project.execute(container, "sh", "-c", _KILL)

    def num_nodes(self) -> dict[str, int]:
        """Of each kind, as a router sees it."""
        return _count(self.nodes())

    def wait_until_routers_know(self, counts: dict[str, int]) -> None:
        """Return when each router by itself lists so many nodes of each kind.

        One hears of a node a second before or after the other, and any of them may be asked next.
        """
        routers = [container for router in ROUTERS for container in self.project.running(router)]
        assert len(routers) == len(ROUTERS)
        command = ("python", "-IS", "-c", _READ_NODES, self.key("api"))

        def know() -> bool:
            listings = [
                json.loads(self.project.execute(router, *command))["nodes"] for router in routers
            ]
            return all(_count(listing) == counts for listing in listings)

        self.project.wait_until(f"every router knows {counts}", know)

    def blocks(self, node: Container) -> dict[str, int]:
        """The node's KV blocks by their state."""
        text = self.project.execute(node, "python", "-IS", "-c", _READ_METRICS)
        return {
            sample.labels["state"]: int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "pdserve_kv_blocks"
        }

    def wait_until_nothing_is_held(self) -> None:
        """Return when every block of every node that runs is free or cached."""
        nodes = [node for service in NODES for node in self.project.running(service)]
        assert nodes

        def nothing_is_held() -> bool:
            books = [self.blocks(node) for node in nodes]
            return all(
                sum(states.values()) == states["free"] + states["cached"] > 0 for states in books
            )

        self.project.wait_until(
            "every block is free or cached", nothing_is_held, limit_s=BOOKS_LIMIT_S
        )


def _count(nodes: Sequence[Mapping[str, object]]) -> dict[str, int]:
    roles = [node["role"] for node in nodes]
    return {service: roles.count(service) for service in NODES}
