"""Clusters whose roles follow the load, drawn from a seed: pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulator.faults.history import AskedRequest, Fault
from simulator.faults.kinds import STORE, WAYS, FaultKind
from simulator.faults.shape import Shape, are_roles_by_load, router_names

SHARE = 0.15
"""The share of the clusters whose roles follow the load."""
MOST_CUTS = 3


def led_by_load(rng: random.Random, shape: Shape) -> Shape:
    """Return the shape, of some clusters with targets of latency.

    Steps are slow there and seats few, so that one role is short of nodes, and then the other one.
    """
    if rng.random() >= SHARE:
        return shape
    return replace(
        shape,
        num_routers=rng.choice((1, 2, 2, 3)),
        num_prefill=rng.choice((1, 2, 3)),
        num_decode=rng.choice((2, 2, 3)),
        num_mixed=rng.choice((0, 0, 0, 1)),
        local_prefill_threshold=rng.choice((4, 4, 8, 0)),
        max_num_seqs=rng.choice((2, 4)),
        step_s=rng.choice((0.05, 0.2, 0.5)),
        target_ttft_s=rng.choice((0.01, 0.5, 5.0)),
        target_tpot_s=rng.choice((0.01, 0.2, 5.0)),
    )


def over_a_longer_time(
    rng: random.Random, shape: Shape, requests: Sequence[AskedRequest]
) -> list[AskedRequest]:
    """Return the requests; where roles follow the load, they come in bursts over some 40 s.

    To find a burst and to change a role takes some seconds each.
    """
    if not are_roles_by_load(shape):
        return list(requests)
    bursts_s = [round(40 * rng.random(), 3) for _ in range(rng.choice((2, 4, 8)))]
    wants_tokens = {burst_s: rng.choice((1, 24, 24)) for burst_s in bursts_s}
    return [_in_burst(one, *rng.choice(list(wants_tokens.items()))) for one in requests]


def _in_burst(asked: AskedRequest, burst_s: float, max_tokens: int) -> AskedRequest:
    return replace(asked.later(burst_s), max_tokens=max_tokens)


def cut_from_store(
    rng: random.Random, shape: Shape, requests: Sequence[AskedRequest]
) -> Iterator[Fault]:
    """Yield cuts of the path between a router and the store."""
    if not are_roles_by_load(shape):
        return
    for _ in range(rng.randint(0, MOST_CUTS)):
        yield Fault(
            at_s=round(rng.choice(requests).at_s + 5 * rng.random(), 4),
            kind=FaultKind.PARTITION,
            target=rng.choice(router_names(shape)),
            other=STORE,
            span_s=rng.choice((0.05, 0.4, 2.0, 7.0)),
            how=rng.choice(WAYS[FaultKind.PARTITION]),
        )
