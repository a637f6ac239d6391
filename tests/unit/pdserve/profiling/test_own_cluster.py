"""The cluster that is measured: its nodes become mixed ones, as its administrator wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.local_cluster.local_keys import local_admin_key, make_local_keys
from pdserve.profiling import own_cluster
from pdserve.profiling.own_cluster import OwnCluster


def test_every_node_becomes_a_mixed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, str, str, str]] = []

    def fetch_json(url: str, path: str, *, api_key: str) -> dict[str, object]:
        assert (url, path, api_key) == ("http://there", "/v1/cluster", "secret")
        return {"nodes": [{"node_id": "prefill-1"}, {"node_id": "decode-1"}]}

    def give_role(url: str, node_id: str, role: str, *, api_key: str) -> str:
        given.append((url, node_id, role, api_key))
        return ""

    monkeypatch.setattr(own_cluster, "fetch_json", fetch_json)
    monkeypatch.setattr(own_cluster, "give_role", give_role)
    cluster = OwnCluster("http://there", "secret")
    cluster.mix_roles()
    assert given == [("http://there", one, "mixed", "secret") for one in ("prefill-1", "decode-1")]
    assert "secret" not in repr(cluster)


def test_the_key_is_that_of_an_administrator(tmp_path: Path) -> None:
    keys = make_local_keys(tmp_path)
    assert local_admin_key(tmp_path) == (keys / "client" / "admin.key").read_text()
