"""A decode node whose KV port is dead: one request pays for it, and it is tried again later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from common.errors import InternalError
from common.nodes import Role
from common.request import FinishReason, GenerationRequest
from protos import pdserve_node_pb2 as pb
from router.cluster.view import DispatcherView
from router.core.known.pair_health import FIRST_PAUSE_S
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.handoff_watch import HandoffWatch
from tests.integration.fake_node import FakeNode
from tests.integration.scripted_cluster import (
    Cluster,
    ids,
    start,
    tokens,
    wait_until,
)
from tests.integration.scripted_cluster import (
    scripted_cluster as scripted_cluster,
)
from tests.support.clocks.manual_clock import ManualClock
from tests.support.observing.live_readings import scaling

NUM_REQUESTS = 12
LAST = tuple(range(1, 8))
Accept = Callable[[GenerationRequest, pb.Ticket | None], Awaitable[pb.Reply]]


class Nodes:
    """Prefill and decode nodes that answer by themselves; KV to those in `dead` does not arrive."""

    def __init__(self, decoders: list[FakeNode]) -> None:
        self._decoders = {node.incarnation.node_id: node for node in decoders}
        self.dead: set[str] = set()
        self.handed_to: list[str] = []
        self.num_local = 0

    def serve(self, prefill: FakeNode) -> Accept:
        """Return what this prefill node does with a prompt."""

        async def accept(request: GenerationRequest, ticket: pb.Ticket | None) -> pb.Reply:
            assert ticket is not None
            self.handed_to.append(ticket.decode_node_id)
            prefill.push(tokens(request.id, 0, 0))
            if ticket.decode_node_id in self.dead:
                failed = {"error_code": "handoff_failed", "error_message": "no answer"}
                prefill.push(tokens(request.id, 1, finish_reason=FinishReason.ERROR, **failed))
            else:
                decode = self._decoders[ticket.decode_node_id]
                decode.push(tokens(request.id, 1, *LAST, finish_reason=FinishReason.LENGTH))
            return pb.Reply(accepted=pb.Accepted())

        return accept

    def serve_locally(self, node: FakeNode) -> None:
        """Let this decode node compute prompts too."""
        grant = node.on_reserve

        async def reserve(request: GenerationRequest, is_local: bool) -> pb.Reply:
            if is_local:
                self.num_local += 1
                first = len(request.output_token_ids)
                rest = tuple(range(first, 8))
                node.push(tokens(request.id, first, *rest, finish_reason=FinishReason.LENGTH))
            return await grant(request, is_local)

        node.on_reserve = reserve


async def nodes_of(cluster: Cluster, num_prefill: int, num_decode: int) -> Nodes:
    decoders = [await cluster.add(f"d{number}", Role.DECODE) for number in range(num_decode)]
    nodes = Nodes(decoders)
    for number in range(num_prefill):
        prefill = await cluster.add(f"p{number}", Role.PREFILL)
        prefill.on_prefill = nodes.serve(prefill)
    for node in decoders:
        nodes.serve_locally(node)
    return nodes


def counted(cluster: Cluster, what: str) -> float | None:
    return cluster.registry.get_sample_value(f"pdserve_router_{what}_total")


def shown_as_avoided(router: Dispatcher) -> dict[str, list[str]]:
    """The decode nodes on which no prompt of a node is placed, by node, as users see them."""
    shown = DispatcherView(router, scaling).describe()["nodes"]
    return {node["node_id"]: [d["node_id"] for d in node["kv_unreachable"]] for node in shown}


@pytest.mark.covers("F30", "F81")
async def test_one_request_fails_on_a_dead_kv_port_and_the_others_go_elsewhere(
    cluster: Cluster,
) -> None:
    nodes = await nodes_of(cluster, 2, 2)
    clock = ManualClock()
    router = await cluster.router(clock=clock)
    nodes.dead = {"d0"}
    for _ in range(NUM_REQUESTS):
        assert ids(await start(router)) == list(range(8))
    assert nodes.handed_to.count("d0") == 1
    # After the pause one request tries it again, and after the next failure a longer one.
    clock.advance(FIRST_PAUSE_S)
    for _ in range(NUM_REQUESTS):
        assert ids(await start(router)) == list(range(8))
    assert nodes.handed_to.count("d0") == 2
    nodes.dead = set()
    clock.advance(FIRST_PAUSE_S)
    for _ in range(NUM_REQUESTS):
        assert ids(await start(router)) == list(range(8))
    assert nodes.handed_to.count("d0") == 2
    clock.advance(FIRST_PAUSE_S)
    for _ in range(NUM_REQUESTS):
        assert ids(await start(router)) == list(range(8))
    assert nodes.handed_to.count("d0") > 2 + NUM_REQUESTS // 3
    assert counted(cluster, "handoffs_failed") == 2


@pytest.mark.covers("F81")
async def test_with_no_other_pair_the_decode_node_computes_the_prompt(cluster: Cluster) -> None:
    nodes = await nodes_of(cluster, 1, 1)
    clock = ManualClock()
    router = await cluster.router(clock=clock)
    nodes.dead = {"d0"}
    for _ in range(NUM_REQUESTS):
        assert ids(await start(router)) == list(range(8))
    assert nodes.handed_to == ["d0"]
    await wait_until(lambda: nodes.num_local == NUM_REQUESTS, "all prompts computed there")
    assert shown_as_avoided(router) == {"d0": [], "p0": ["d0"]}
    clock.advance(FIRST_PAUSE_S)
    assert shown_as_avoided(router) == {"d0": [], "p0": []}


async def test_a_bug_in_the_judgement_of_pairs_ends_one_request_and_no_stream(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("bug")

    await nodes_of(cluster, 1, 1)
    router = await cluster.router()
    with monkeypatch.context() as patched:
        patched.setattr(HandoffWatch, "before_output", broken)
        with pytest.raises(InternalError, match="an internal error ended"):
            await start(router)
    assert counted(cluster, "nodes_lost") == 0
    assert ids(await start(router)) == list(range(8))
