"""Nodes of a simulated cluster get other roles under load: nobody notices, and nothing is left."""

from __future__ import annotations

import random
from functools import partial

import pytest

from common.errors import InvalidRequest
from common.nodes import Role
from common.settings.config import HandoffConfig, PlacementConfig, SchedulingConfig
from node.flow.messages import CallRefused
from simulator.cluster import SimulatedCluster
from simulator.node import NodeSaid
from tests.support.examples import everyday
from tests.unit.simulator.clusters import MIXED, D, P, clients_of, setup_of, trace

NUM_MOVES = 50


def moved(cluster: SimulatedCluster, seed: int, span_s: float) -> list[Role]:
    """Have roles moved at random while requests come; one node decodes throughout."""
    rng = random.Random(seed)
    seen: list[Role] = []

    def move() -> None:
        node = rng.choice(cluster.nodes[:-1]).me
        cluster.set_role(node, rng.choice([P, D, MIXED]))
        seen.append(cluster.role_of(node))

    for number in range(NUM_MOVES):
        cluster.timeline.at(number * span_s / NUM_MOVES, move)
    return seen


def failures(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What nodes refuse, but for want of room, and the errors that they send."""
    found: list[str] = []
    on_said = cluster.router.on_said

    def listen(said: NodeSaid) -> None:
        errors = [one.error for _, one in said.answers if isinstance(one, CallRefused)]
        found.extend(str(error) for error in errors if "no room" not in str(error))
        found.extend(one.details.error_message for one in said.outputs if one.details.error_code)
        on_said(said)

    monkeypatch.setattr(cluster.router, "on_said", listen)
    return found


@pytest.mark.parametrize("seed", range(everyday(1, of=4)))
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_every_answer_is_whole_while_roles_move(
    seed: int, preemption_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduling = SchedulingConfig(preemption_mode=preemption_mode, reservation_policy="none")
    setup = setup_of({P: 2, MIXED: 1, D: 1}, num_blocks=120, scheduling=scheduling)
    cluster = SimulatedCluster(setup)
    seen, wrong = moved(cluster, seed, span_s=4.0), failures(cluster, monkeypatch)
    cluster.run(clients_of(cluster, trace(200, gap_s=0.02, seed=seed)))
    assert set(seen) == {P, D, MIXED}
    for one in cluster.served:
        assert (one.outcome, one.num_tokens) == ("stop", one.client.trace.num_output)
    assert wrong == [], "nothing is refused or begins anew because of a role"


def test_new_work_follows_the_role_at_once_and_what_runs_ends_where_it_is() -> None:
    rarely_listed = PlacementConfig(node_lease_s=600.0)
    cluster = SimulatedCluster(setup_of({P: 2, D: 1}, placement=rarely_listed))
    moved = cluster.nodes[0]
    answers_at_s: list[float] = []

    def look(last_s: float) -> None:
        if moved.scheduler.running:
            answers_at_s.append(cluster.timeline.now_s())
        if cluster.timeline.now_s() < last_s:
            cluster.timeline.after(0.01, partial(look, last_s))

    cluster.timeline.at(0.4, partial(cluster.set_role, moved.me, D))
    cluster.timeline.at(0.4, partial(look, 3.0))
    cluster.run(clients_of(cluster, trace(100)))
    counted = moved.scheduler.statistics().counters
    assert counted.num_decode_tokens > 100
    assert answers_at_s[0] < 0.6
    assert cluster.role_of(moved.me) is D


def test_a_role_that_a_node_has_changes_nothing_and_one_that_it_cannot_have_is_refused() -> None:
    cluster = SimulatedCluster(setup_of({D: 1}, handoff=HandoffConfig(local_prefill_threshold=0)))
    node = cluster.nodes[0].me
    cluster.set_role(node, D)
    with pytest.raises(InvalidRequest, match="cannot become prefill"):
        cluster.set_role(node, P)
    assert cluster.role_of(node) is D
