"""The turns of a session on scripted nodes: they go where the last one was, until that is worse."""

from __future__ import annotations

import dataclasses

import pytest

from common.errors import Overloaded
from common.nodes import NodeLoad, Role
from common.request import FinishReason, GenerationRequest, SamplingParams
from protos import pdserve_node_pb2 as pb
from protos.codec import refusal_to_proto
from router.api.sessions import session_id
from router.core.generation import TokenChunk
from router.dispatch.dispatcher import Dispatcher
from tests.integration.fake_node import IDLE, FakeNode, Prefill, record_of
from tests.integration.scripted_cluster import DEADLINE_S, Cluster, ids, tokens, wait_until
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)
from tests.support.http.read_answer import read

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)
ALICE, BOB = session_id("alice", b"chat", ""), session_id("bob", b"chat", "")


class Turns:
    """Two nodes of each role, which answer by themselves, and a router."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes: dict[str, FakeNode] = {}
        self.router: Dispatcher
        self.num_sent = 0

    async def start(self, policy: str) -> None:
        for node_id in ("d0", "d1"):
            self.nodes[node_id] = await self.cluster.add(node_id, Role.DECODE)
        for node_id in ("p0", "p1"):
            self.nodes[node_id] = await self.cluster.add(node_id, Role.PREFILL)
            self.nodes[node_id].on_prefill = self._serves(self.nodes[node_id])
        self.router = await self.cluster.router(policy=policy)

    def _serves(self, prefill: FakeNode) -> Prefill:
        async def accept(request: GenerationRequest, ticket: pb.Ticket | None) -> pb.Reply:
            assert ticket is not None
            prefill.push(tokens(request.id, 0, 0))
            rest = tuple(range(1, 8))
            last = tokens(request.id, 1, *rest, finish_reason=FinishReason.LENGTH)
            self.nodes[ticket.decode_node_id].push(last)
            return pb.Reply(accepted=pb.Accepted())

        return accept

    async def ask(self, session: bytes = b"") -> set[str]:
        """Answer one request with a prompt of its own; return the nodes that did."""
        self.num_sent += 1
        prompt = tuple(range(100 * self.num_sent, 100 * self.num_sent + 40))
        before = {name: len(node.asked) for name, node in self.nodes.items()}
        stream = read(self.router, prompt, SAMPLING, deadline_s=DEADLINE_S, session=session)
        answer: list[TokenChunk] = [chunk async for chunks in stream for chunk in chunks]
        assert ids(answer) == list(range(8))
        return {name for name, node in self.nodes.items() if len(node.asked) > before[name]}

    async def report(self, node_id: str, load: NodeLoad) -> None:
        """The router reads this of a node, and that nothing of it is this router's own."""
        node = self.nodes[node_id]
        record = record_of(node.incarnation, node.role, f"127.0.0.1:{node.port}")
        await self.cluster.store.heartbeat(record, load, lease_s=600)
        for _ in range(3):
            await self.cluster.refresh()

    def placed(self, outcome: str) -> float:
        """How many requests with a session were placed so."""
        name, labels = "pdserve_router_session_placements_total", {"outcome": outcome}
        return self.cluster.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def turns(cluster: Cluster) -> Turns:
    """Without a session, the two nodes of a role take turns."""
    turns = Turns(cluster)
    await turns.start("round_robin")
    return turns


@pytest.mark.covers("F134")
async def test_the_next_turn_of_a_session_goes_to_the_same_nodes(turns: Turns) -> None:
    first = await turns.ask(ALICE)
    assert len(first) == 2
    for _ in range(5):
        await turns.ask()
        assert await turns.ask(ALICE) == first
    assert (turns.placed("new"), turns.placed("kept"), turns.placed("moved")) == (1, 5, 0)
    assert turns.cluster.registry.get_sample_value("pdserve_router_sessions") == 1


async def test_one_name_of_two_keys_is_two_sessions(turns: Turns) -> None:
    of_alice = await turns.ask(ALICE)
    of_bob = await turns.ask(BOB)
    assert of_alice.isdisjoint(of_bob)
    for _ in range(3):
        await turns.ask()
        assert await turns.ask(BOB) == of_bob
        assert await turns.ask(ALICE) == of_alice
    assert turns.cluster.registry.get_sample_value("pdserve_router_sessions") == 2


@pytest.mark.parametrize("role", ["d", "p"])
async def test_a_session_leaves_a_node_that_drains_and_stays_where_it_went(
    turns: Turns, role: str
) -> None:
    first = await turns.ask(ALICE)
    (left,) = [name for name in first if name.startswith(role)]
    await turns.report(left, dataclasses.replace(IDLE, is_draining=True))
    second = await turns.ask(ALICE)
    assert left not in second
    assert first - {left} < second
    await turns.report(left, IDLE)
    for _ in range(3):
        await turns.ask()
        assert await turns.ask(ALICE) == second
    assert (turns.placed("kept"), turns.placed("moved")) == (3, 1)


@pytest.mark.parametrize("role", ["d", "p"])
async def test_a_session_leaves_a_node_that_dies(turns: Turns, role: str) -> None:
    first = await turns.ask(ALICE)
    (left,) = [name for name in first if name.startswith(role)]
    node = turns.nodes.pop(left)
    turns.cluster.nodes.remove(node)
    await node.die()
    await wait_until(
        lambda: node.incarnation not in [n.incarnation for n in turns.router.pool.nodes()],
        "the node is lost",
    )
    second = await turns.ask(ALICE)
    assert len(second) == 2
    assert first - {left} < second
    assert await turns.ask(ALICE) == second


async def test_a_session_leaves_a_decode_node_that_refuses_and_stays_where_it_went(
    turns: Turns,
) -> None:
    first = await turns.ask(ALICE)
    (full,) = [name for name in first if name.startswith("d")]
    grant = turns.nodes[full].on_reserve

    async def refuse(request: GenerationRequest, is_local: bool) -> pb.Reply:
        return pb.Reply(refusal=refusal_to_proto(Overloaded("no seat", retry_after_s=1.0)))

    turns.nodes[full].on_reserve = refuse
    second = await turns.ask(ALICE)
    assert full in second, "it was asked"
    turns.nodes[full].on_reserve = grant
    for _ in range(3):
        await turns.ask()
        assert full not in await turns.ask(ALICE)


@pytest.mark.covers("F141")
@pytest.mark.parametrize("role", ["d", "p"])
async def test_a_session_leaves_a_node_that_others_keep_busy(cluster: Cluster, role: str) -> None:
    """Before it is full: it is not even asked."""
    turns = Turns(cluster)
    await turns.start("least_loaded")
    first = await turns.ask(ALICE)
    (busy,) = [name for name in first if name.startswith(role)]
    await turns.report(busy, dataclasses.replace(IDLE, num_running=4))
    assert await turns.ask(ALICE) == first
    await turns.report(busy, dataclasses.replace(IDLE, num_running=5))
    second = await turns.ask(ALICE)
    assert busy not in second
    assert first - {busy} < second
