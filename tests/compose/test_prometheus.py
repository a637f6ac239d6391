"""A Prometheus beside the cluster finds every router and node, and has data for the dashboard."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from pdserve.local_cluster.free_ports import free_loopback_port
from tests.compose.cluster import MODEL, Cluster
from tests.compose.conftest import CONTAINER_UID
from tests.compose.load import ask
from tests.compose.project import COMPOSE, Project

DASHBOARD = COMPOSE / "observability/grafana/dashboards/pdserve.json"
# No request is refused here, and speculation is off.
EMPTY_PANELS = {"Refusals", "Drafts accepted"}


class Prometheus:
    """The HTTP interface of a Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def targets(self) -> list[dict[str, Any]]:
        """Return what it scrapes; nothing before it answers."""
        try:
            reply = httpx.get(f"{self._url}/api/v1/targets", timeout=10.0)
        except httpx.TransportError:
            return []
        return list(reply.json()["data"]["activeTargets"]) if reply.is_success else []

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the present value of an expression, one entry for each series."""
        reply = httpx.get(f"{self._url}/api/v1/query", params={"query": expression}, timeout=10.0)
        assert reply.is_success, f"{expression}: {reply.text}"
        return list(reply.json()["data"]["result"])


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, work: Path) -> Prometheus:
    data = work / "data" / "prometheus"
    data.mkdir(parents=True)
    os.chown(data, CONTAINER_UID, CONTAINER_UID)
    address = f"127.0.0.1:{free_loopback_port()}"
    settings = cluster.project.settings | {
        "PROMETHEUS_LISTEN": address,
        "DATA_FOLDER": str(data.parent),
        "GRAFANA_PASSWORD": "of nobody",
    }
    files = [*cluster.project.files, COMPOSE / "compose.observability.yaml"]
    project = Project(cluster.engine, cluster.project.name, files, settings)
    project.run("up", "--detach", "--no-deps", "prometheus")
    return Prometheus(f"http://{address}")


def test_it_finds_and_may_read_every_router_and_node(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    wanted = {"router-1": 1, "router-2": 1, **cluster.counts}

    def all_are_up() -> bool:
        healthy = [one for one in prometheus.targets() if one["health"] == "up"]
        found = Counter(one["discoveredLabels"]["__meta_dns_name"] for one in healthy)
        return found == wanted

    cluster.project.wait_until(f"targets are up: {wanted}", all_are_up)


def test_every_panel_of_the_dashboard_shows_something(
    cluster: Cluster, client: OpenAI, prometheus: Prometheus
) -> None:
    numbers = count()

    def asked_and_shown(expression: str) -> bool:
        # A new prompt each time: cached blocks are not handed off again.
        ask(client, MODEL, f"{next(numbers)} of many, and long enough: " + "counted " * 20)
        return shows(prometheus, expression)

    for title, expression in panels():
        if title in EMPTY_PANELS:
            prometheus.query(expression)
        else:
            what = f"{title} shows {expression}"
            cluster.project.wait_until(what, partial(asked_and_shown, expression))


def shows(prometheus: Prometheus, expression: str) -> bool:
    """Return whether the expression has a value. 0 / 0 is none."""
    values = [series["value"][1] for series in prometheus.query(expression)]
    return bool(values) and "NaN" not in values


def panels() -> Iterator[tuple[str, str]]:
    """Return the panels' titles with their expressions."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
