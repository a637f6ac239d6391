"""Histories that a test writes itself, and drawn ones without what came to them later; run."""

from __future__ import annotations

from dataclasses import replace

from simulator.faults.cluster import FaultyCluster
from simulator.faults.demand.shares import USUAL
from simulator.faults.drawing import draw_history
from simulator.faults.history import AskedRequest, Fault, History
from simulator.faults.kinds import BREAKING, OF_STEPS
from simulator.faults.search import ALL, quiet
from simulator.faults.shape import MOST_QUEUED, ROUTER, Shape

WITHOUT_DEMANDS = replace(
    USUAL,
    loaded=0.0,
    uneven=0.0,
    salted=0.0,
    under_grammars=0.0,
    scheduled_otherwise=0.0,
    wide=0.0,
    scored=0.0,
)


def plain_history(seed: int) -> History:
    """Return a drawn history with one router, on nodes with nothing but their pools, unchanged."""
    history = draw_history(seed, ALL, WITHOUT_DEMANDS)
    return replace(
        history,
        shape=plain_shape(history.shape),
        requests=tuple(replace(one, router=ROUTER, priority=0) for one in history.requests),
        faults=tuple(
            replace(one, target=ROUTER if one.target.startswith(ROUTER) else one.target)
            for one in history.faults
            if one.kind in BREAKING and one.kind not in OF_STEPS
        ),
    )


def plain_shape(shape: Shape) -> Shape:
    return replace(
        shape,
        num_routers=1,
        keeps_prefixes=False,
        is_staged=False,
        is_on_card=False,
        is_warmed=False,
        has_priorities=False,
        preemption_policy="last_in_first_out",
        target_ttft_s=0.0,
        target_tpot_s=0.0,
        kv_lease_s=30.0,
        max_queued=MOST_QUEUED,
        pools=(),
        sheds=False,
    )


def a_shape() -> Shape:
    """Return one prefill and two decode nodes with room for everything."""
    return replace(
        plain_shape(draw_history(1, ALL, WITHOUT_DEMANDS).shape),
        num_prefill=1,
        num_decode=2,
        num_mixed=0,
        num_blocks=40,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        local_prefill_threshold=4,
        lease_s=2.0,
        drain_s=1.0,
        message_s=1e-3,
        kv_message_s=1e-3,
        lane="zmq",
        step_s=10e-3,
    )


def an_asked_request(
    at_s: float,
    name: str,
    *,
    num_prompt: int = 30,
    max_tokens: int = 2,
    deadline_s: float = 60.0,
) -> AskedRequest:
    return AskedRequest(
        at_s=at_s,
        name=name,
        num_prompt=num_prompt,
        group=0,
        num_shared=0,
        max_tokens=max_tokens,
        seed=1,
        deadline_s=deadline_s,
        router=ROUTER,
    )


def a_history(shape: Shape, asked: list[AskedRequest], *faults: Fault) -> History:
    return History(seed=1, shape=shape, requests=tuple(asked), faults=faults)


def run(history: History) -> FaultyCluster:
    """Run a history without a violation; return its cluster as it is at the end."""
    with quiet():
        cluster = FaultyCluster(history)
        cluster.run()
    return cluster


def outcomes(cluster: FaultyCluster) -> set[str]:
    return {outcome for _, outcome, _ in cluster.outcomes()}
