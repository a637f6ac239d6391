"""Histories are drawn in several ways, and have each of their parts in the share that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simulator.faults.demand.shares import (
    CHANGED,
    DENSE,
    HURRIED,
    ON_CARDS,
    USUAL,
    WAYS,
    way_of,
)
from simulator.faults.drawing import draw_history
from simulator.faults.history import History
from simulator.faults.kinds import BREAKING, HARMLESS, FaultKind
from simulator.faults.search import ALL, history_of
from simulator.faults.shape import MOST_QUEUED, problems_of
from tests.unit.simulator.faults.histories import WITHOUT_DEMANDS

FEW = replace(ALL, num_requests=8)
SEEDS = range(96)
NOTHING = replace(
    WITHOUT_DEMANDS, lanes={"zmq": 1}, further=0.0, staged=0.0, on_card=0.0, upgraded=0.0
)
PARTS: dict[str, Callable[[History], bool]] = {
    "further": lambda one: one.shape.num_kv_lanes > 1,
    "staged": lambda one: one.shape.is_staged,
    "on_card": lambda one: one.shape.is_on_card,
    "upgraded": lambda one: any(fault.kind is FaultKind.UPGRADE for fault in one.faults),
    "loaded": lambda one: one.shape.max_queued < MOST_QUEUED,
    "uneven": lambda one: bool(one.shape.pools),
    "salted": lambda one: any(asked.salt for asked in one.requests),
    "under_grammars": lambda one: any(asked.grammar for asked in one.requests),
    "scheduled_otherwise": lambda one: one.shape.requeues_at_tail,
    "wide": lambda one: one.shape.is_wide,
    "scored": lambda one: any(asked.has_logprobs for asked in one.requests),
    "hurried": lambda one: sum(asked.deadline_s < 60.0 for asked in one.requests) > 5,
}
"""By share: whether a history has the part; some of those for which it was drawn do not."""


def test_every_share_has_its_part() -> None:
    assert {"lanes", *PARTS} == set(USUAL.__slots__)


@pytest.mark.parametrize("part", PARTS)
def test_histories_have_a_part_in_its_share_of_the_seeds(part: str) -> None:
    def num_with(share: float) -> int:
        changed: dict[str, Any] = {part: share}
        shares = replace(NOTHING, **changed)
        return sum(PARTS[part](draw_history(seed, FEW, shares)) for seed in SEEDS)

    most = num_with(1.0)
    assert num_with(0.0) == 0
    assert most > 0.3 * len(SEEDS)
    assert abs(num_with(0.4) / most - 0.4) < 0.15


def test_seeds_have_every_way_in_turn() -> None:
    assert [way_of(seed) for seed in range(8_000_000, 8_000_016)] == [*WAYS, *WAYS]
    assert [way.is_calm for way in WAYS].count(True) == 2
    usual = [way.shares for way in WAYS if way.shares == USUAL]
    assert len(usual) == len(WAYS) // 2
    for shares in (DENSE, HURRIED, ON_CARDS, CHANGED):
        assert [way.shares for way in WAYS].count(shares) == 1


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_history_is_drawn_in_the_way_of_its_seed(way: int) -> None:
    for seed in SEEDS[way :: len(WAYS)]:
        history = history_of(seed, FEW)
        assert not problems_of(history.shape)
        assert len(history.requests) == FEW.num_requests
        wishes = FEW if not WAYS[way].is_calm else replace(FEW, kinds=HARMLESS)
        assert history == draw_history(seed, wishes, WAYS[way].shares)


def test_on_cards_all_caches_are() -> None:
    histories = [draw_history(seed, FEW, ON_CARDS) for seed in SEEDS]
    assert all(one.shape.is_on_card for one in histories)
    assert {one.shape.lane for one in histories} == {"zmq", "ipc", "rdma_read"}


def test_every_way_respects_the_wishes() -> None:
    kinds = (FaultKind.CRASH, FaultKind.DRAIN)
    wishes = replace(FEW, kinds=kinds, num_prefill=3, num_decode=2)
    for seed in range(4 * len(WAYS)):
        history = history_of(seed, wishes)
        shape, found = history.shape, {fault.kind for fault in history.faults}
        assert (shape.num_prefill, shape.num_decode, shape.num_mixed) == (3, 2, 0)
        assert found <= set(kinds)
        assert not (way_of(seed).is_calm and FaultKind.CRASH in found)


def test_a_wish_for_faults_alone_is_fulfilled_in_calm_histories_too() -> None:
    for seed in range(len(WAYS)):
        history = history_of(seed, replace(FEW, kinds=BREAKING))
        assert history.faults, seed
        assert not history_of(seed, replace(FEW, kinds=())).faults
