"""Clusters of which one part does something wrong: the checks of routers, nodes and runs see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.errors import Draining, HandoffFailed, InternalError, NodeLost, Overloaded
from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.request import (
    FinishReason,
    GenerationRequest,
    OutputDetails,
    RequestOutput,
    SamplingParams,
)
from engine.core.blocks.block_pool import BlockUse
from node.control.block_reports import CachedBlocks
from node.control.role import NodeRole
from node.flow.messages import Submit
from router.core.policies.query import NoneStays
from simulator.faults.awaited import AwaitedReply
from simulator.faults.cluster import FaultyCluster
from simulator.faults.demand.watched_router import WatchedRouter
from simulator.faults.history import Fault
from simulator.faults.kinds import FaultKind
from simulator.faults.node.faulty_node import FaultyNode
from simulator.faults.router import FaultyRouter
from simulator.faults.shape import ROUTER
from tests.unit.simulator.faults.histories import a_history, a_shape, an_asked_request, run

ASKED = [an_asked_request(1.5, "r1", max_tokens=6)]
DRAIN = Fault(at_s=1.55, kind=FaultKind.DRAIN, target="decode-1", other=ROUTER)
ALL_LEFT = tuple(
    Fault(at_s=1.3, kind=FaultKind.DRAIN, target=target, other=ROUTER)
    for target in ("decode-0", "decode-1")
)
Method = Callable[..., Any]


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing instead of what is replaced."""


def twice(call: Method) -> Method:
    def called(*given: Any, **named: Any) -> Any:
        call(*given, **named)
        return call(*given, **named)

    return called


def after_its_end(call: Method) -> Method:
    def called(router: Any, choice: Any, *given: Any) -> Any:
        choice.served.outcome = "stop"
        return call(router, choice, *given)

    return called


def instead(of: str, error: Exception) -> Callable[[Method], Method]:
    """Return what calls a method of watched routers, with an error, instead of another one."""

    def made(_: Method) -> Method:
        return lambda router, choice, *__: vars(WatchedRouter)[of](router, choice, error)

    return made


@pytest.mark.parametrize(
    ("owner", "name", "change", "faults", "says"),
    [
        (FaultyRouter, "_on_chunk", twice, (), r"r1 gets token 0, and has \d"),
        (FaultyRouter, "_on_chunk", after_its_end, (), "r1 gets tokens after its end"),
        (FaultyRouter, "_end", twice, (), "r1 ends twice"),
        (
            *(FaultyRouter, "_on_chosen", instead("_fail", NodeLost("it is gone")), ()),
            r"r1 ends by node_lost, and can go on: \{.*decode",
        ),
        (
            *(FaultyRouter, "_on_chosen", instead("_on_none_left", NoneStays("all leave")), ()),
            r"decode-.* decode, and are taken for nodes that leave",
        ),
        (
            *(FaultyRouter, "_on_none_left", instead("_fail", HandoffFailed("no KV")), ALL_LEFT),
            "r1 ends by handoff_failed, and can go on: it waits",
        ),
        (
            *(FaultyRouter, "ask_for", lambda _: nothing, ()),
            "1 requests wait, long after their deadlines",
        ),
        (
            *(FaultyRouter, "why_held", lambda _: lambda _: "it counts 1 request", ()),
            "it counts 1 request, 40 s after the last request has ended",
        ),
        (
            *(FaultyNode, "on_drained", lambda _: nothing, (DRAIN,)),
            r"decode-1#\d+ drains, is not empty in time, and nothing is in its way",
        ),
    ],
)
def test_what_a_part_does_wrong_is_noticed(
    owner: Any,
    name: str,
    change: Callable[[Method], Method],
    faults: tuple[Fault, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = next(vars(one)[name] for one in owner.__mro__ if name in vars(one))
    monkeypatch.setattr(owner, name, change(found))
    with pytest.raises(InternalError, match=says):
        run(a_history(a_shape(), ASKED, *faults))


def ended() -> FaultyCluster:
    return run(a_history(a_shape(), ASKED))


def test_a_node_that_is_not_empty_has_not_drained() -> None:
    node = ended().nodes["decode-0"]
    node.scheduler.pool.allocate(1, BlockUse.RUNNING)
    with pytest.raises(InternalError, match=r"decode-0#\d+ has drained, and holds something"):
        node.on_drained()


def test_a_node_gives_up_what_has_no_time_left() -> None:
    life = ended().nodes["decode-0"].life
    draining, full = (
        RequestOutput(AttemptId("r1", 1), details=ended_by(code))
        for code in ("draining", "overloaded")
    )
    life.check_output(full)
    with pytest.raises(InternalError, match="gives up r1/1, which has time"):
        life.check_output(draining)
    life.drain_ends_s = 0.0
    life.check_output(draining)


def test_a_change_of_a_role_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of the simulator answers within the moment in which it is asked."""

    async def change(_: NodeRole, role: Role, _number: int, _others: object) -> Role:
        await AwaitedReply()
        return role

    life = ended().nodes["decode-0"].life
    monkeypatch.setattr(NodeRole, "change", change)
    with pytest.raises(InternalError, match="it waits for something"):
        life.set_role(Role.PREFILL)


def ended_by(code: str) -> OutputDetails:
    return OutputDetails(finish_reason=FinishReason.ERROR, error_code=code)


@pytest.mark.parametrize("error", [Overloaded("too many"), Draining("it leaves")])
def test_a_node_that_has_read_all_refuses_nothing_for_their_number(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = ended().nodes["decode-0"]

    def full(_: object) -> None:
        raise error

    monkeypatch.setattr(node, "inbox", type("Inbox", (), {"put": full, "has_messages": False}))
    request = GenerationRequest(
        id=AttemptId("r2", 1),
        prompt_token_ids=(3,),
        sampling=SamplingParams(max_tokens=1),
        deadline_s=1.0,
    )
    message = Submit(request=request, router=Incarnation(ROUTER, 1), reply_to=1, received_at_s=0.0)
    with pytest.raises(InternalError, match="has read all, and refuses a request as too many"):
        node.put(message)


def test_a_router_knows_blocks_of_nodes_that_it_hears_and_no_others() -> None:
    cluster = ended()
    router, node = cluster.routers[ROUTER], cluster.nodes["prefill-0"]
    router.check_blocks()
    cached, node.cached = node.cached, CachedBlocks()
    with pytest.raises(InternalError, match=r"blocks of prefill-0#\d+ in"):
        router.check_blocks()
    node.cached, router.links[node.me].is_heard = cached, False
    with pytest.raises(InternalError, match="which are not heard"):
        router.check_blocks()


def test_a_router_that_counts_what_has_ended_holds_it() -> None:
    cluster = ended()
    router, node = cluster.routers[ROUTER], cluster.nodes["decode-0"].me
    assert router.why_held() == ""
    router.beside.membership.on_leg_opened(node, 0)
    assert router.why_held() == f"the router counts 1 requests on {node}, and none runs"
