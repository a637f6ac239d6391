"""Routers and nodes of a test's cluster that a loaded machine lets answer late."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from tests.support.cluster.cluster import Cluster, ClusterSpec

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
