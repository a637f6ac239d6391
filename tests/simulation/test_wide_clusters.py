"""A wide cluster, of which each choice looks at some nodes: is it as good as a look at all?

The same requests are placed twice, on a roster and on a list, which is always looked at whole.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from common.ids import Incarnation
from common.kv.blocks import BlockKey
from common.nodes import Role
from router.core.known.node_view import NodeView
from router.core.known.roster import Roster
from router.core.placement import Placer
from router.core.policies.query import Query
from tests.support.examples import everyday
from tests.support.nodes.node_views import node

NUM_NODES = 60
"""Nodes of each role."""
SEATS = 16
NUM_REQUESTS = everyday(700, of=1800)
SHARED_TOKENS = 640
OWN_TOKENS = 128
BLOCK_SIZE = 64


def view(node_id: str, role: Role) -> NodeView:
    one = node(node_id, role, max_model_len=10**6)
    record = dataclasses.replace(
        one.record, block_size=BLOCK_SIZE, max_num_seqs=SEATS, num_blocks=4096
    )
    return dataclasses.replace(one, record=record, num_used_blocks=0.0)


@dataclass
class Outcome:
    """How many answers beyond the mean the busiest decode node had in the end and at worst, the
    same of prompts on prefill nodes, blocks that the prefill nodes already held, and refusals."""

    most_answers_beyond: float = 0.0
    most_prompts_beyond: float = 0.0
    num_hits: int = 0
    num_refused: int = 0


class WideCluster:
    """Prefill and decode nodes whose views are always right."""

    def __init__(self, policy: str, seed: int, num_computed: int, *, is_scanned: bool) -> None:
        """Make one in which the last `num_computed` prompts that were placed are computed."""
        self._num_computed = num_computed
        self._placer = Placer(policy, seed)
        self._rng = random.Random(seed)
        self._views = [
            view(f"{role.value}-{number:03}", role)
            for role in (Role.PREFILL, Role.DECODE)
            for number in range(NUM_NODES)
        ]
        self._roster = Roster(self._views)
        self._is_scanned = is_scanned
        self._decoders = {one.incarnation for one in self._views if one.record.role is Role.DECODE}
        self._held: dict[Incarnation, set[BlockKey]] = {
            one.incarnation: set() for one in self._views
        }
        self._running: list[tuple[Incarnation, Incarnation]] = []
        self._computing: list[Incarnation] = []
        self.outcome = Outcome()

    def _nodes(self) -> Sequence[NodeView]:
        return list(self._roster) if self._is_scanned else self._roster

    def _change(self, me: Incarnation, by: int) -> None:
        before = self._roster.view(me)
        assert before is not None
        tokens = by * (SHARED_TOKENS + OWN_TOKENS) if me not in self._decoders else 0
        self._roster.put(
            dataclasses.replace(
                before,
                num_requests=before.num_requests + by,
                num_queued_tokens=before.num_queued_tokens + tokens,
            )
        )

    def ask(self, number: int, group: int) -> None:
        """Place one request; a node that is full refuses, and another one is chosen."""
        shared = range(10**6 * (1 + group), 10**6 * (1 + group) + SHARED_TOKENS)
        own = range(2 * 10**8 + OWN_TOKENS * number, 2 * 10**8 + OWN_TOKENS * (number + 1))
        query, tried = Query((*shared, *own), 8), set[Incarnation]()
        while True:
            chosen = self._placer.choose(self._nodes(), query, tried)
            assert chosen.decode is not None
            assert chosen.prefill is not None
            holder = self._roster.view(chosen.decode)
            assert holder is not None
            if not holder.is_full:
                break
            self.outcome.num_refused += 1
            tried.add(chosen.decode)
        keys = query.block_keys(holder.record)
        held = self._held[chosen.prefill]
        self.outcome.num_hits += sum(one in held for one in keys)
        held.update(keys)
        self._running.append((chosen.prefill, chosen.decode))
        self._computing.append(chosen.prefill)
        for me in (chosen.prefill, chosen.decode):
            self._change(me, 1)
        if len(self._computing) > self._num_computed:
            self._change(self._computing.pop(0), -1)

    def end_one(self) -> None:
        """End any of the answers."""
        _, decode = self._running.pop(self._rng.randrange(len(self._running)))
        self._change(decode, -1)

    def note(self) -> None:
        """Note how far the busiest nodes are from the mean."""
        answers = [one.num_requests for one in self._roster if one.incarnation in self._decoders]
        prompts = Counter(self._computing)
        beyond = max(answers) - sum(answers) / NUM_NODES
        self.outcome.most_answers_beyond = max(self.outcome.most_answers_beyond, beyond)
        beyond = max(prompts.values()) - prompts.total() / NUM_NODES
        self.outcome.most_prompts_beyond = max(self.outcome.most_prompts_beyond, beyond)


def run(
    policy: str, num_computed: int, *, is_scanned: bool, busy: float, num_groups: int
) -> Outcome:
    """Place all requests, with so much of the seats in use."""
    seed = 1
    cluster = WideCluster(policy, seed, num_computed, is_scanned=is_scanned)
    rng = random.Random(seed)
    most = int(busy * SEATS * NUM_NODES)
    for number in range(NUM_REQUESTS):
        if number >= most:
            cluster.end_one()
        cluster.ask(number, rng.randrange(num_groups))
        if number > most // 2 and number % 16 == 0:
            cluster.note()
    return cluster.outcome


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_affinity"])
@pytest.mark.parametrize(("busy", "num_groups"), [(0.5, 8), (0.9, 300)])
def test_the_load_is_as_even_as_after_a_look_at_all(
    policy: str, busy: float, num_groups: int
) -> None:
    some = run(policy, 2 * NUM_NODES, is_scanned=False, busy=busy, num_groups=num_groups)
    whole = run(policy, 2 * NUM_NODES, is_scanned=True, busy=busy, num_groups=num_groups)
    assert some.most_answers_beyond <= whole.most_answers_beyond + 1.5
    assert some.most_prompts_beyond <= whole.most_prompts_beyond + 1.5
    assert some.num_refused == 0


@pytest.mark.parametrize("num_groups", [8, 60, 300])
def test_prefixes_are_found_as_often(num_groups: int) -> None:
    """Few prompts are computed at a time: what is held decides."""
    some = run("prefix_affinity", 8, is_scanned=False, busy=0.5, num_groups=num_groups)
    whole = run("prefix_affinity", 8, is_scanned=True, busy=0.5, num_groups=num_groups)
    assert some.num_hits >= 0.97 * whole.num_hits
