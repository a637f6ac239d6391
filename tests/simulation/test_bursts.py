"""Bursts that follow each other while what nodes report is old: are prompts spread over the nodes?

Nodes report their load, and the router reads it, at moments of their own, as in a real cluster: a
report is up to two and a half seconds old when a prompt is placed by it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from placement.store import LiveNode
from router.core.membership import Membership
from router.core.placement import Placer
from router.core.policies.query import Query
from tests.support.examples import everyday
from tests.support.nodes.node_records import record

LEASE_S = 5.0
EVERY_S = LEASE_S / 4
"""Between two reports of a node, and between two times that the router reads them."""
STEP_S = 0.05
PROMPT_TOKENS = 857
DECODE_S = 0.3
NUM_RUNS = everyday(6, of=60)


@dataclass
class Request:
    """Where it is, and what is left of it there."""

    prefill: SimulatedNode
    decode: SimulatedNode
    left_tokens: float = PROMPT_TOKENS
    left_s: float = DECODE_S


@dataclass
class SimulatedNode:
    """Computes one prompt after the other, and decodes any number of answers."""

    record: NodeRecord
    phase_s: float
    prompts: list[Request] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    reported: NodeLoad | None = None

    @property
    def me(self) -> Incarnation:
        return self.record.incarnation

    def load(self) -> NodeLoad:
        used = -(-PROMPT_TOKENS // self.record.block_size) * len(self.prompts + self.decodes)
        num_running = len(self.decodes) + min(1, len(self.prompts))
        return NodeLoad(
            free_blocks=max(0, self.record.num_blocks - used),
            free_seats=32 - num_running,
            num_running=num_running,
            num_waiting=max(0, len(self.prompts) - 1),
            queued_tokens=round(sum(one.left_tokens for one in self.prompts)),
        )


class BurstCluster:
    """Nodes, one router's membership and placer, and a clock that is moved step by step."""

    def __init__(self, rng: random.Random, policy: str, num_prefill: int) -> None:
        self.now_s = 0.0
        self.tokens_per_s = rng.uniform(2000, 6000)
        self.prefill = [self._node(rng, f"p{n}", Role.PREFILL) for n in range(num_prefill)]
        self.decode = [self._node(rng, f"d{n}", Role.DECODE) for n in range(2)]
        self.nodes = {node.me: node for node in (*self.prefill, *self.decode)}
        self.members = Membership(model="m", lease_s=LEASE_S)
        self.placer = Placer(policy)
        self.poll_phase_s = rng.uniform(0, EVERY_S)
        self._num_asked = 0
        self._list()
        for node in self.nodes:
            self.members.on_heard(node)

    def _node(self, rng: random.Random, node_id: str, role: Role) -> SimulatedNode:
        sizes = {"block_size": 16, "num_blocks": 2000, "max_num_seqs": 32, "max_model_len": 2000}
        node = SimulatedNode(record(node_id, role, **sizes), rng.uniform(0, EVERY_S))
        node.reported = node.load()
        return node

    def _list(self) -> None:
        listed = [
            LiveNode(record=node.record, load=node.reported)
            for node in self.nodes.values()
            if node.reported
        ]
        self.members.on_listing(listed, self.now_s)

    def ask(self) -> SimulatedNode:
        """Place one request with a prompt of its own; return who computes it."""
        self._num_asked += 1
        first = 10_000 * self._num_asked
        query = Query(tuple(range(first, first + PROMPT_TOKENS)), 8)
        choice = self.placer.choose(self.members.nodes(), query, frozenset())
        assert choice.decode is not None
        assert choice.prefill is not None
        request = Request(self.nodes[choice.prefill], self.nodes[choice.decode])
        self.members.on_leg_opened(choice.prefill, PROMPT_TOKENS)
        self.members.on_leg_opened(choice.decode, 0)
        request.prefill.prompts.append(request)
        return request.prefill

    def _pass_step(self) -> None:
        self.now_s += STEP_S
        for node in self.nodes.values():
            if node.prompts:
                node.prompts[0].left_tokens -= self.tokens_per_s * STEP_S
                if node.prompts[0].left_tokens <= 0:
                    done = node.prompts.pop(0)
                    done.decode.decodes.append(done)
                    self.members.on_leg_closed(node.me, PROMPT_TOKENS)
            for one in list(node.decodes):
                one.left_s -= STEP_S
                if one.left_s <= 0:
                    node.decodes.remove(one)
                    self.members.on_leg_closed(node.me, 0)
            if self._is_due(node.phase_s):
                node.reported = node.load()
        if self._is_due(self.poll_phase_s):
            self._list()

    def _is_due(self, phase_s: float) -> bool:
        """Whether the last step passed a moment `phase_s` after a multiple of `EVERY_S`."""
        since_s = self.now_s - phase_s
        return since_s // EVERY_S != (since_s - STEP_S) // EVERY_S

    def pass_time(self, by_s: float) -> None:
        ends_at_s = self.now_s + by_s
        while self.now_s < ends_at_s:
            self._pass_step()


def bursts(rng: random.Random, policy: str, num_prefill: int, gap_s: float) -> Iterator[list[int]]:
    """After each burst: how many prompts each prefill node has."""
    cluster = BurstCluster(rng, policy, num_prefill)
    for _ in range(8):
        for _ in range(3 * num_prefill):
            cluster.ask()
        yield [len(node.prompts) for node in cluster.prefill]
        cluster.pass_time(gap_s)


@pytest.mark.covers("F123")
@pytest.mark.parametrize("policy", ["least_loaded", "prefix_affinity"])
@pytest.mark.parametrize("num_prefill", [2, 3, 5])
def test_bursts_that_follow_each_other_are_spread(policy: str, num_prefill: int) -> None:
    for seed in range(NUM_RUNS):
        rng = random.Random(seed)
        gap_s = rng.uniform(0.2, 2.5)
        for number, prompts in enumerate(bursts(rng, policy, num_prefill, gap_s)):
            assert max(prompts) - min(prompts) <= 1, f"seed {seed}, burst {number}: {prompts}"
