"""Every request begins with one long system prompt, and nothing else is alike: is the load even?"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from common.ids import Incarnation
from common.nodes import Role
from router.core.known.node_view import NodeView
from router.core.known.sessions import KnownSessions, SessionNodes
from router.core.placement import Placer
from router.core.policies import POLICIES
from router.core.policies.query import Query
from tests.support.nodes.node_views import node

SEATS = 32
OWN_TOKENS = 100
NUM_REQUESTS = 120
MOST_APART = SEATS // 8 + 1
"""Answers that one decode node may have more than another."""
MOST_SESSION_APART = SEATS // 2


class Cluster:
    """As many prefill as decode nodes; prompts are computed in an instant, answers last."""

    def __init__(self, policy: str, num_nodes: int, num_shared: int) -> None:
        self._placer = Placer(policy)
        self._sessions = KnownSessions(ttl_s=60.0)
        self._start = tuple(range(num_shared))
        self._num_asked = 0
        self._answers: list[Incarnation] = []
        self._nodes = [
            self._node(f"{role.value}-{number:02}", role)
            for role in (Role.PREFILL, Role.DECODE)
            for number in range(num_nodes)
        ]
        self._decoders = [one.incarnation for one in self._nodes if one.record.role is Role.DECODE]

    def _node(self, node_id: str, role: Role) -> NodeView:
        one = node(node_id, role, max_model_len=10**6)
        record = dataclasses.replace(one.record, block_size=64, max_num_seqs=SEATS)
        return dataclasses.replace(one, record=record)

    def ask(self, session: bytes = b"") -> None:
        """Place one request, which shares the start of its prompt with all others."""
        self._num_asked += 1
        own = range(10**6 * self._num_asked, 10**6 * self._num_asked + OWN_TOKENS)
        query = Query((*self._start, *own), 8, session=session)
        query.last = self._sessions.last(session, 0.0)
        running = Counter(self._answers)
        views = [
            dataclasses.replace(one, num_requests=running[one.incarnation]) for one in self._nodes
        ]
        chosen = self._placer.choose(views, query, frozenset())
        assert chosen.decode is not None
        if session:
            nodes = SessionNodes(chosen.decode, chosen.prefill, len(query.prompt_token_ids))
            self._sessions.on_placed(session, nodes, 0.0)
        self._answers.append(chosen.decode)

    def end(self, number: int) -> None:
        """End one of the answers."""
        self._answers.pop(number)

    def apart(self) -> int:
        """How many answers more the busiest decode node has than the idlest one."""
        running = Counter(self._answers)
        return max(running[one] for one in self._decoders) - min(
            running[one] for one in self._decoders
        )


def furthest_apart(cluster: Cluster, num_at_once: int, names: list[bytes], seed: int) -> int:
    """The most that decode nodes are apart, with so many answers at once, by sessions in turn."""
    rng, furthest = random.Random(seed), 0
    for number in range(NUM_REQUESTS):
        if number >= num_at_once:
            cluster.end(rng.randrange(num_at_once))
        cluster.ask(names[number % len(names)])
        furthest = max(furthest, cluster.apart())
    return furthest


@pytest.mark.covers("F133")
@pytest.mark.parametrize("policy", ["least_loaded", "prefix_affinity"])
@pytest.mark.parametrize("num_nodes", [2, 4, 12])
@pytest.mark.parametrize(("num_shared", "num_at_once"), [(960, 8), (6400, 24), (25600, 48)])
def test_under_one_shared_start_the_load_stays_even(
    policy: str, num_nodes: int, num_shared: int, num_at_once: int
) -> None:
    cluster = Cluster(policy, num_nodes, num_shared)
    assert furthest_apart(cluster, num_at_once, [b""], num_nodes) <= MOST_APART


@pytest.mark.parametrize("policy", POLICIES)
def test_sessions_of_many_names_are_spread(policy: str) -> None:
    """Each of 24 conversations stays on its nodes, and has one answer at a time."""
    cluster, names = Cluster(policy, 4, 6400), [b"%d" % number for number in range(24)]
    assert furthest_apart(cluster, len(names), names, seed=1) <= MOST_SESSION_APART
    for _ in names:
        cluster.end(0)
    for name in names:
        cluster.ask(name)
    assert cluster.apart() <= MOST_APART + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_one_name_for_everybody_does_not_fill_one_node(policy: str) -> None:
    cluster = Cluster(policy, 4, 6400)
    assert furthest_apart(cluster, 100, [b"everybody"], seed=1) <= MOST_SESSION_APART + MOST_APART
    assert furthest_apart(Cluster(policy, 4, 64), 40, [b"everybody"], seed=1) > MOST_APART
