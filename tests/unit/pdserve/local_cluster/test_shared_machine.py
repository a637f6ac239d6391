"""The nodes of a local cluster share one machine's memory and cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.nodes import Role
from common.settings.config import Config, EngineConfig
from pdserve.configuration.flags import UP_MEMORY_FRACTION
from pdserve.local_cluster.cluster_plan import ClusterSize, plan_cluster


def engines(engine: EngineConfig, size: ClusterSize, num_cores: int = 8) -> list[EngineConfig]:
    base = Config(role=Role.ROUTER, engine=engine)
    planned = plan_cluster(base, size, "unix:///s", Path("keys"), num_cores=num_cores)
    return [one.config.engine for one in planned if one.config.role is not Role.ROUTER]


@pytest.mark.parametrize(
    ("fraction", "size", "wanted"),
    [
        (0.3, ClusterSize(prefill=1, decode=1, mixed=0), [0.15] * 2),
        (0.8, ClusterSize(prefill=2, decode=1, mixed=1), [0.2] * 4),
        (0.5, ClusterSize(prefill=0, decode=0, mixed=1), [0.5]),
        # Each node's own default would be of the whole machine.
        (0.0, ClusterSize(prefill=1, decode=1, mixed=0), [UP_MEMORY_FRACTION / 2] * 2),
    ],
)
def test_each_node_gets_an_equal_part(
    fraction: float, size: ClusterSize, wanted: list[float]
) -> None:
    found = engines(EngineConfig(memory_fraction=fraction), size)
    assert [engine.memory_fraction for engine in found] == wanted


@pytest.mark.parametrize(
    ("configured", "num_nodes", "num_cores", "wanted"),
    [
        (0, 2, 2, 0),  # all cores
        (0, 3, 2, 1),
        (0, 4, 2, 1),
        (0, 1, 1, 0),
        (3, 4, 2, 3),
    ],
)
def test_nodes_that_outnumber_the_cores_have_one_thread_each(
    configured: int, num_nodes: int, num_cores: int, wanted: int
) -> None:
    size = ClusterSize(prefill=0, decode=0, mixed=num_nodes)
    found = engines(EngineConfig(num_threads=configured), size, num_cores)
    assert [engine.num_threads for engine in found] == [wanted] * num_nodes


@pytest.mark.parametrize(
    ("gpus", "num_nodes", "cards", "fraction"),
    [
        ("0", 2, ["0", "0"], 0.45),
        ("1,3", 2, ["1", "3"], 0.9),
        ("0,1", 3, ["0", "1", "0"], 0.45),
        ("0,1,2", 1, ["0"], 0.9),
    ],
)
def test_nodes_take_turns_on_the_cards_and_share_each_ones_memory(
    gpus: str, num_nodes: int, cards: list[str], fraction: float
) -> None:
    size = ClusterSize(prefill=0, decode=0, mixed=num_nodes)
    found = engines(EngineConfig(gpus=gpus), size)
    assert [engine.gpus for engine in found] == cards
    assert {engine.memory_fraction for engine in found} == {fraction}
    [chosen, *_] = engines(EngineConfig(gpus=gpus, memory_fraction=0.2), size)
    assert chosen.memory_fraction == pytest.approx(0.2 * fraction / 0.9)
