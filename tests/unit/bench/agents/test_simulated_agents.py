"""Sessions on simulated nodes: what is asked has their turns, and where it is found."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.agents.sessions import Session, Turn, make_sessions
from bench.agents.simulated import (
    HOST_MEMORY,
    SHAPE,
    asked_turns,
    num_distinct_tokens,
    served,
)
from common.nodes import Role
from simulator.profile import FOLDER, read_profile
from simulator.trace_file import TOKENS_PER_HASH_ID

PROFILE = read_profile(FOLDER / "8b_h100.json")
FEW = replace(SHAPE, num_sessions=6, num_systems=1, num_turns=4)
TWO_EACH = {Role.PREFILL: 2, Role.DECODE: 2, Role.MIXED: 0}


def turn(parent: int, num_new: int, num_answer: int) -> Turn:
    return Turn(parent=parent, think_s=1.0, new_tokens=(5,) * num_new, num_answer_tokens=num_answer)


def test_a_turn_begins_with_what_is_whole_of_the_one_that_it_goes_on_from() -> None:
    turns = (turn(-1, 600, 100), turn(0, 900, 100), turn(0, 900, 100))
    session = Session(name="a", system=(1,) * 1024, turns=turns)
    first, second, branch = asked_turns([session], 1.0)
    lengths = [one.trace.num_prompt for one in (first, second, branch)]
    assert lengths == [1624, 2624, 2624]
    # 1,624 tokens are three whole ids and a part, which the answer changes.
    assert second.trace.hash_ids[:3] == branch.trace.hash_ids[:3] == first.trace.hash_ids[:3]
    assert not set(second.trace.hash_ids[4:]) & set(branch.trace.hash_ids[4:])
    assert first.trace.hash_ids[3] not in second.trace.hash_ids


def test_sessions_share_their_system_and_nothing_else() -> None:
    asked = asked_turns(make_sessions(FEW, 1), 1.0)
    assert [one.turn for one in asked].count(0) == FEW.num_sessions
    assert all(one.trace.arrival_s <= other.trace.arrival_s for one, other in pairwise(asked))
    firsts = [set(one.trace.hash_ids) for one in asked if one.turn == 0]
    shared = firsts[0].intersection(*firsts[1:])
    assert len(shared) == FEW.system_tokens // TOKENS_PER_HASH_ID
    assert len(set.union(*firsts)) == len(shared) + sum(len(one - shared) for one in firsts)


def test_host_memory_finds_what_small_pools_evict() -> None:
    asked = asked_turns(make_sessions(FEW, 1), 0.5)
    memory = num_distinct_tokens(asked) * PROFILE.kv_bytes_per_token // 2
    small = replace(PROFILE, kv_memory_bytes=memory // 2)
    pools, tiers = (served(asked, small, TWO_EACH, size) for size in (0, HOST_MEMORY))
    alone = served(asked, PROFILE, {Role.PREFILL: 0, Role.DECODE: 0, Role.MIXED: 1}, 0)
    assert pools.hit_rate < tiers.hit_rate <= alone.hit_rate
    for one, has_host in ((pools, False), (tiers, True), (alone, False)):
        by_tier = one.figures["hit_rate_by_tier"]
        assert isinstance(by_tier, dict)
        assert sum(by_tier.values()) == pytest.approx(one.hit_rate, abs=2e-4)
        assert (by_tier["host"] > 0) == has_host
        by_turn = one.figures["ttft_ms_p50_by_turn"]
        assert isinstance(by_turn, list)
        assert len(by_turn) == FEW.num_turns
