"""The whole search on played trials: what is found, what is advised, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.nodes import Role
from common.observing.latency import LatencyTargets
from common.settings.config import Config
from pdserve.planning import answer
from pdserve.planning.answer import PlannedNodes, TargetsOutOfReach, TrialPlanner, Wanted
from pdserve.planning.search import Fleet
from pdserve.planning.trial import PlanTrial
from pdserve.planning.workload import Workload
from simulator.cluster import ClusterSetup
from simulator.profile import FOLDER, read_profile
from simulator.trace_file import TraceRequest

REQUESTS = [TraceRequest(float(number), 100, 10) for number in range(100)]
WANTED = Wanted(
    profile=read_profile(FOLDER / "8b_h100.json"),
    config=Config(role=Role.DECODE),
    workload=Workload("trace", REQUESTS, 100),
    targets=LatencyTargets(ttft_s=1.0, tpot_s=0.1),
    attain=0.9,
    seeds=2,
)


class Played:
    """Trials of a load that needs so many nodes that prefill and that decode.

    A decode node does `with_seats` times as much with 64 seats, and mixed ones are half as good.
    Alone, `alone` of the requests are within the targets.
    """

    def __init__(
        self, prefill: float, decode: float, *, with_seats: float = 1.0, alone: float = 1.0
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.with_seats, self.alone = with_seats, alone

    def __call__(
        self,
        setup: ClusterSetup,
        requests: Sequence[TraceRequest],
        targets: LatencyTargets,
        *,
        wanted: float,
    ) -> PlanTrial:
        load = 99.0 / requests[-1].arrival_s
        seats = self.with_seats if setup.config.engine.max_num_seqs == 64 else 1.0
        nodes = setup.num_nodes
        room = min(
            nodes.get(Role.PREFILL, 0) / self.prefill,
            nodes.get(Role.DECODE, 0) * seats / self.decode,
        )
        room = max(room, nodes.get(Role.MIXED, 0) / 2 / (self.prefill + self.decode)) / load
        share = self.alone if load < 0.5 else 0.96 * min(1.0, room)
        is_stopped = share < wanted
        return PlanTrial(
            score=share - 1 if is_stopped else share, is_stopped=is_stopped, num_requests=100,
            num_failed=0, ttfts_s=(0.2,), tpots_s=(0.05,), causes=Counter({"decode": 3}),
            busy=dict.fromkeys(nodes, 0.1), lasted_s=100.0,
        )  # fmt: skip


def found(monkeypatch: pytest.MonkeyPatch, played: Played, **changed: object) -> PlannedNodes:
    monkeypatch.setattr(answer, "run_trial", played)
    wanted = replace(WANTED, **changed)  # type: ignore[arg-type]
    return TrialPlanner(wanted, lambda line: None).answer()


def test_the_fewest_nodes_are_found_with_both_kinds_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = found(monkeypatch, Played(2.6, 1.4))
    assert plan.best.shape == Fleet(3, 2)
    assert (plan.needed, plan.is_met) == (5, True)
    assert plan.mixed.shape == Fleet(mixed=5)
    assert plan.margin > 1.5
    assert plan.gives_way == (("decode", 3),)
    assert plan.advised.gains == ()
    assert plan.curve[Fleet(3, 2)]


def test_a_setting_that_carries_more_is_advised_with_the_nodes_that_do_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = found(monkeypatch, Played(1.5, 1.95, with_seats=2.5))
    assert plan.best.shape == Fleet(2, 2)
    assert [flag for flag, _ in plan.advised.gains] == ["--max-num-seqs 64"]
    assert plan.advised.num_nodes == 3
    assert plan.advised.carries > plan.best.carries


class BetterWhenOverloaded(Played):
    """With 64 seats 85 % are within the targets at any load: never enough."""

    def __call__(
        self,
        setup: ClusterSetup,
        requests: Sequence[TraceRequest],
        targets: LatencyTargets,
        *,
        wanted: float,
    ) -> PlanTrial:
        trial = super().__call__(setup, requests, targets, wanted=wanted)
        if setup.config.engine.max_num_seqs != 64:
            return trial
        return replace(trial, score=0.85 if wanted == 0 else -0.15, is_stopped=wanted > 0)


def test_a_setting_that_helps_but_carries_no_more_is_not_advised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = found(monkeypatch, BetterWhenOverloaded(1.5, 1.95))
    assert plan.is_met
    assert plan.advised.gains == ()


def test_too_few_nodes_are_answered_with_how_many_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = found(monkeypatch, Played(2.6, 1.4), num_nodes=3)
    assert (plan.best.shape, plan.is_met, plan.needed) == (Fleet(2, 1), False, 5)
    plan = found(monkeypatch, Played(2.6, 1.4), num_nodes=8)
    assert (plan.best.shape.total, plan.is_met, plan.needed) == (8, True, 5)


def test_what_nobody_meets_is_refused_with_the_best_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        TargetsOutOfReach, match=r"within 200 ms and 50[.]0 ms, and that is the best"
    ):
        found(monkeypatch, Played(1.0, 1.0, alone=0.8))
    with pytest.raises(TargetsOutOfReach, match="not even 512 nodes"):
        found(monkeypatch, Played(2000.0, 2000.0))
