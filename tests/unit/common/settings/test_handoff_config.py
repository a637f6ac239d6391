"""What the settings of KV between nodes may be."""

from __future__ import annotations

import pytest

from common.nodes import Role
from common.settings.config import Config, EngineConfig, ModelConfig
from common.settings.handoff_config import HandoffConfig


def texts(handoff: HandoffConfig, *, caching: bool = True) -> list[str]:
    engine = EngineConfig(enable_prefix_caching=caching)
    model = ModelConfig(model=".")
    config = Config(role=Role.MIXED, model=model, handoff=handoff, engine=engine)
    return [problem.text for problem in config.problems()]


@pytest.mark.parametrize("transport", ["auto", "ipc", "shm", "rdma", "zmq"])
def test_a_node_may_be_warmed_whatever_carries_its_kv(transport: str) -> None:
    assert texts(HandoffConfig(warm_from="auto", kv_transport=transport)) == []
    assert texts(HandoffConfig(warm_from="decode-1", kv_transport=transport)) == []


def test_a_node_that_reuses_nothing_is_not_warmed() -> None:
    assert texts(HandoffConfig(warm_from="auto"), caching=False) == [
        "warm_from is set: wanted empty, with enable_prefix_caching = False"
    ]
    assert texts(HandoffConfig(), caching=False) == []


def test_the_name_of_a_node_has_a_bound() -> None:
    assert texts(HandoffConfig(warm_from="n" * 129)) == [
        f"warm_from is '{'n' * 75}…': wanted at most 128 characters"
    ]
