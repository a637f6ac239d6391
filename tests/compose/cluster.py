"""A running project as a cluster: its members, the blocks of its nodes, its HTTP interface."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from docker.models.containers import Container
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.compose.load import REQUEST_LIMIT_S
from tests.compose.project import Project

NODES = ("prefill", "decode")
ROUTERS = ("router-1", "router-2")
MODEL = "tiny"
BOOKS_LIMIT_S = 60.0

# Run inside a container: the metrics port is not reachable from outside, and requires the token.
_READ_METRICS = """
import os, urllib.request
address = os.environ["PDSERVE_HOST"] + ":" + os.environ["PDSERVE_METRICS_PORT"]
token = open("/keys/metrics.token").read()
header = {"Authorization": f"Bearer {token}"}
request = urllib.request.Request(f"http://{address}/metrics", headers=header)
print(urllib.request.urlopen(request, timeout=5).read().decode())
"""

# Run inside a router: through the balancer, either router could answer.
_READ_NODES = """
import os, sys, urllib.request
address = os.environ["PDSERVE_HOST"] + ":" + os.environ["PDSERVE_PORT"]
header = {"Authorization": f"Bearer {sys.argv[1]}"}
request = urllib.request.Request(f"http://{address}/v1/cluster", headers=header)
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""

# Kill every process of the container except process 1, the init process.
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
        """Return the API key `name`, which is `api` or `admin`."""
        return self.key_file(name).read_text()

    def key_file(self, name: str) -> Path:
        """Return the file of the API key `name`."""
        return self._keys / "client" / f"{name}.key"

    @contextmanager
    def client(self) -> Iterator[OpenAI]:
        """Provide OpenAI's client, without retries: they would hide failures."""
        with OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key("api"),
            max_retries=0,
            timeout=REQUEST_LIMIT_S,
        ) as client:
            yield client

    def launch(self) -> None:
        """Start everything, one node first: it compiles the kernels that all nodes share."""
        self.project.run("up", "--detach", "--no-build", "decode")
        self.project.wait_until_healthy("decode", 1)
        self.bring_up()

    def bring_up(self) -> None:
        """Start what does not run, `counts` nodes of each kind, and wait for all of it."""
        scale = [f"--scale={service}={count}" for service, count in self.counts.items()]
        self.project.run("up", "--detach", "--no-build", "--no-recreate", *scale)
        for service, count in self.counts.items():
            self.project.wait_until_healthy(service, count)
        for router in ROUTERS:
            self.project.wait_until_healthy(router, 1)
        self.project.wait_until_healthy("balancer", 1)
        self.wait_until_routers_know(self.counts)

    def scale(self, service: str, count: int) -> None:
        """Change the number of nodes of a kind, with `docker compose up --scale`."""
        self.counts[service] = count
        self.bring_up()

    def status(self, path: str) -> int:
        """Return the status of a GET through the balancer, or 0 without an answer."""
        reply = self._get(path)
        return 0 if reply is None else reply.status_code

    def nodes(self) -> list[dict[str, object]]:
        """Return the nodes that a router lists; none while no router answers."""
        reply = self._get("/v1/cluster")
        return list(reply.json()["nodes"]) if reply is not None and reply.is_success else []

    def _get(self, path: str) -> httpx.Response | None:
        headers = {"Authorization": f"Bearer {self.key('api')}"}
        try:
            return httpx.get(f"{self.url}{path}", headers=headers, timeout=10.0)
        except httpx.HTTPError:
            return None

    def node_id(self, container: Container) -> str:
        """Return the id of a node, which contains the container's host name."""
        hostname = container.attrs["Config"]["Hostname"]
        (found,) = (
            str(node["node_id"]) for node in self.nodes() if hostname in str(node["node_id"])
        )
        return found

    def epochs(self) -> dict[str, int]:
        """Return the epoch of each node."""
        return {str(node["node_id"]): int(str(node["epoch"])) for node in self.nodes()}

    def kill(self, container: Container) -> None:
        """Kill the process inside with SIGKILL, as the kernel does when memory is exhausted.

        The engine restarts such a container, but not one that the engine itself was told to kill.
        """
        self.project.execute(container, "sh", "-c", _KILL)

    def num_nodes(self) -> dict[str, int]:
        """Return the number of nodes of each kind that a router lists."""
        return _count(self.nodes())

    def wait_until_routers_know(self, counts: dict[str, int]) -> None:
        """Wait until each router lists `counts` nodes of each kind.

        Routers learn of a node at different times, and the balancer may choose either of them.
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
        """Return the number of the node's KV blocks in each state."""
        text = self.project.execute(node, "python", "-IS", "-c", _READ_METRICS)
        return {
            sample.labels["state"]: int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "pdserve_kv_blocks"
        }

    def wait_until_nothing_is_held(self) -> None:
        """Wait until every block of every running node is free or cached."""
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
