"""Routers and nodes of a test's cluster that a loaded machine lets answer late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from common.nodes import Role
from placement.store import LiveNode
from router.cluster.view import node_json
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.nodes.node_views import prefill

IDLE = {"nodes": [], "router": {"num_running": 0}}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """No node, and a router that was not started."""
    store = Mock(url="redis://127.0.0.1:1", keys=lambda prefix: [])
    return Cluster(ClusterSpec(name="late", model=tmp_path, nodes=()), store, tmp_path)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The next call has no answer in time while this has an entry."""
    entries = [True]

    def get(*_: object, **__: object) -> httpx.Response:
        if entries and entries.pop():
            raise httpx.ReadTimeout("5 s are over")
        return httpx.Response(200, json=IDLE)

    monkeypatch.setattr(httpx, "get", get)
    return entries


def test_a_router_is_asked_again_whether_nodes_are_idle(cluster: Cluster, late: list[bool]) -> None:
    cluster.wait_seen_idle()
    assert not late


def test_a_router_is_asked_again_what_it_holds(cluster: Cluster, late: list[bool]) -> None:
    cluster.check_settled()
    assert not late


def test_a_node_is_asked_again_for_its_books(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [httpx.ReadTimeout("5 s are over"), "busy", "idle"]
    monkeypatch.setattr(cluster, "status", Mock(side_effect=answers))
    cluster.wait_status("decode-1", lambda books: books == "idle", "idle")  # type: ignore[comparison-overlap]


def test_a_cluster_is_ready_once_no_router_suspects_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill node that is suspected, as one that stood still is at first, gets no prompt."""
    view = prefill("p0")
    nodes = (NodeSpec("p0", Role.PREFILL),)
    spec = ClusterSpec(name="wary", model=tmp_path, nodes=nodes, routers=((),))
    cluster = Cluster(spec, Mock(url="redis://127.0.0.1:1"), tmp_path)
    shown = [node_json(replace(view, is_suspected=is_so)) for is_so in (True, False)]
    del shown[1]["kv_unreachable"]  # a router of the release before does not tell it

    def get(*_: object, **__: object) -> httpx.Response:
        return httpx.Response(200, json={"nodes": [shown.pop(0)]})

    for process in cluster.processes.values():
        monkeypatch.setattr(process, "require_running", lambda: None)
    monkeypatch.setattr(
        cluster, "live_nodes", lambda: [LiveNode(record=view.record, load=view.load)]
    )
    monkeypatch.setattr(httpx, "get", get)
    cluster.wait_ready()
    cluster.close()
    assert not shown
