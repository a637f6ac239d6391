"""How far a node raises its limit of open files."""

from __future__ import annotations

import resource

import pytest

from pdserve.roles.file_limit import NODE_FILES, allow_node_files


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to"),
    [
        (1024, 1 << 20, NODE_FILES),
        (1024, resource.RLIM_INFINITY, NODE_FILES),
        (1024, 4096, 4096),
        (NODE_FILES, NODE_FILES, None),
        (1 << 20, 1 << 20, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_a_node_raises_its_limit_as_far_as_it_may(
    soft: int,
    hard: int,
    raised_to: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    allow_node_files(kv_lanes=1)
    assert raised == ([(raised_to, hard)] if raised_to else [])
    is_little = raised_to is not None and raised_to < NODE_FILES
    assert ("KV connections to about 1792 nodes at most" in caplog.text) == is_little


@pytest.mark.parametrize(("soft", "num_nodes"), [(4 * NODE_FILES, None), (NODE_FILES, 960)])
def test_each_lane_of_a_pair_needs_files(
    soft: int,
    num_nodes: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    allow_node_files(kv_lanes=4)
    wanted = f"KV connections to about {num_nodes} nodes" if num_nodes else ""
    assert wanted in caplog.text
    assert bool(caplog.text) == bool(num_nodes)
