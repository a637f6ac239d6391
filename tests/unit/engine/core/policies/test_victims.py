"""Preemption when blocks run out: the orders on one literal table, and how much is freed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.kv.blocks import blocks_for
from engine.core.policies.victims import (
    VICTIM_ORDERS,
    headroom_blocks,
    spare_recently_resumed,
)
from tests.support.engine.policy_views import BLOCK_SIZE, Decode, View

DECODES = [
    Decode(name="A", num_output=10, num_prompt=500, priority=1, arrival=1),
    Decode(name="B", num_output=10, num_prompt=2000, priority=1, arrival=2),
    Decode(name="C", num_output=200, num_prompt=100, priority=1, arrival=3),
    Decode(name="D", num_output=3, num_prompt=50, priority=0, arrival=4),
    Decode(name="E", num_output=60, num_prompt=900, priority=2, arrival=5),
]


def names(views: list[Decode]) -> str:
    return "".join(view.name for view in views)


@pytest.mark.covers("E41", "E42", "E43", "S33")
@pytest.mark.parametrize(
    ("order", "expected"),
    [
        pytest.param("last_in_first_out", "EDCBA", id="E41"),
        pytest.param("shortest_output", "DBAEC", id="E42"),
        pytest.param("priority", "DBACE", id="E43"),
    ],
)
def test_the_first_in_order_is_the_first_victim(order: str, expected: str) -> None:
    assert names(VICTIM_ORDERS[order](DECODES)) == expected
    assert names(VICTIM_ORDERS[order](DECODES[::-1])) == expected


@pytest.mark.covers("B21", "C16", "E44")
def test_the_least_work_is_lost_and_not_the_most() -> None:
    key = {view.name: (view.num_output, -view.num_prompt) for view in DECODES}
    upstream = sorted(DECODES, key=lambda view: key[view.name], reverse=True)[:-1]
    assert names(upstream) == "CEAB"
    victims = VICTIM_ORDERS["shortest_output"](DECODES)[:-1]
    assert names(victims) == "DBAE"
    assert names(victims)[0] not in names(upstream)


@pytest.mark.covers("S33")
@pytest.mark.parametrize("order", VICTIM_ORDERS)
def test_ties_end_with_the_sequence_id(order: str) -> None:
    same = [replace(DECODES[0], name=str(i), sequence_id=i) for i in range(3)]
    assert names(VICTIM_ORDERS[order](same)) == names(VICTIM_ORDERS[order](same[::-1])) == "210"


@pytest.mark.covers("B12", "E45")
@pytest.mark.parametrize("order", VICTIM_ORDERS)
def test_nobody_decodes_so_nobody_is_a_victim(order: str) -> None:
    assert VICTIM_ORDERS[order]([]) == []
    assert spare_recently_resumed([], 16) == []


@pytest.mark.covers("S37")
def test_a_sequence_that_just_resumed_is_the_last_victim() -> None:
    # D and B resumed; D has drawn enough since then, B one token too few.
    by_name = {view.name: view for view in DECODES}
    by_name["D"] = replace(by_name["D"], num_output_since_resume=16)
    by_name["B"] = replace(by_name["B"], num_output_since_resume=15)
    by_name["E"] = replace(by_name["E"], num_output_since_resume=0)
    ordered = VICTIM_ORDERS["shortest_output"](list(by_name.values()))
    assert names(ordered) == "DBAEC"
    assert names(spare_recently_resumed(ordered, 16)) == "DACBE"
    assert names(spare_recently_resumed(ordered, 17)) == "ACDBE"
    assert names(spare_recently_resumed(ordered, 0)) == "DBAEC"


def headroom(num_left: int, steps: int, num_drafts: int, remaining: int = 1000) -> int:
    left = [View(num_output=7, max_new_tokens=7 + remaining)] * num_left
    return headroom_blocks(
        left, retract_decode_steps=steps, tokens_per_seq=1 + num_drafts, block_size=BLOCK_SIZE
    )


@pytest.mark.covers("E47", "E48")
@pytest.mark.parametrize(
    ("num_left", "steps", "num_drafts", "expected"),
    [
        pytest.param(2, 20, 0, 1, id="E47 K=0"),
        pytest.param(2, 20, 3, 3, id="E47 K=3"),
        pytest.param(31, 20, 0, 10, id="E48 20 steps"),
        pytest.param(31, 40, 0, 20, id="E48 40 steps"),
        pytest.param(31, 0, 3, 0, id="no headroom asked for"),
    ],
)
def test_headroom(num_left: int, steps: int, num_drafts: int, expected: int) -> None:
    assert headroom(num_left, steps, num_drafts) == expected


@pytest.mark.covers("B22", "C15", "S19")
def test_headroom_is_rounded_up() -> None:
    assert (20 * 2 // BLOCK_SIZE, 20 * 4 * 2 // BLOCK_SIZE) == (0, 2)
    assert (headroom(2, 20, 0), headroom(2, 20, 3)) == (1, 3)


@pytest.mark.covers("C31")
def test_headroom_lasts_as_long_with_drafts_as_without() -> None:
    for num_drafts in (0, 1, 3, 8):
        slots = headroom(16, 20, num_drafts) * BLOCK_SIZE
        assert slots // (16 * (1 + num_drafts)) == 20


def test_nobody_needs_headroom_past_its_last_token() -> None:
    assert headroom(64, 20, 3, remaining=1) == 1
    assert headroom(64, 20, 3, remaining=0) == 0
    assert headroom(1, 20, 0, remaining=-5) == 0


def test_one_past_its_last_token_takes_no_headroom_from_others() -> None:
    left = [View(num_output=7, max_new_tokens=1000), View(num_output=7, max_new_tokens=2)]
    for views in (left[:1], left):
        assert (
            headroom_blocks(
                views, retract_decode_steps=BLOCK_SIZE + 1, tokens_per_seq=1, block_size=BLOCK_SIZE
            )
            == 2
        )


@pytest.mark.covers("E49")
def test_what_recomputing_each_costs() -> None:
    costs = [blocks_for(view.num_prompt + view.num_output, BLOCK_SIZE) for view in DECODES]
    assert costs == [8, 32, 5, 1, 15]
    cheapest = VICTIM_ORDERS["shortest_output"](DECODES)[0]
    assert costs[DECODES.index(cheapest)] == min(costs)
