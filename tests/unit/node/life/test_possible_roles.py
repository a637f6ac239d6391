"""Which roles a node can be given while it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.nodes import Role
from common.settings.config import Config, EngineConfig, HandoffConfig, SpeculationConfig
from node.life.make_scheduler import max_chunk_tokens_of
from node.life.possible_roles import NODE_ROLES, can_decode, refused_roles


@pytest.mark.parametrize("role", NODE_ROLES)
def test_a_node_with_the_usual_settings_can_have_every_role(role: Role) -> None:
    assert refused_roles(Config(role=role)) == {}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED])
def test_without_local_prefill_only_a_decode_node_keeps_its_role(role: Role) -> None:
    handoff = HandoffConfig(local_prefill_threshold=0)
    assert refused_roles(Config(role=role, handoff=handoff)) == {}
    refused = refused_roles(Config(role=Role.DECODE, handoff=handoff))
    assert refused.keys() == {Role.PREFILL, Role.MIXED}
    assert "local_prefill_threshold = 0" in refused[role]


def test_a_step_for_prompts_alone_may_be_too_small_to_decode() -> None:
    config = Config(
        role=Role.PREFILL,
        engine=EngineConfig(max_num_seqs=8, max_num_batched_tokens=16),
        speculation=SpeculationConfig(speculative_method="ngram", num_speculative_tokens=2),
    )
    refused = refused_roles(config)
    assert refused.keys() == {Role.DECODE, Role.MIXED}
    assert "max_num_batched_tokens is 16: wanted at least 24" in refused[Role.DECODE]
    assert not can_decode(config)


@pytest.mark.parametrize("threshold", [0, 1, 512])
@pytest.mark.parametrize("budget", [16, 24, 4096])
@pytest.mark.parametrize("role", NODE_ROLES)
def test_no_role_that_is_possible_needs_larger_steps_than_were_planned_for(
    role: Role, budget: int, threshold: int
) -> None:
    config = Config(
        role=role,
        engine=EngineConfig(max_num_seqs=8, max_num_batched_tokens=budget),
        handoff=HandoffConfig(local_prefill_threshold=threshold),
    )
    possible = [one for one in NODE_ROLES if one not in refused_roles(config)]
    for one in possible:
        assert max_chunk_tokens_of(replace(config, role=one)) <= max_chunk_tokens_of(config)
