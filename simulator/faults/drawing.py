"""A history from its seed. What is drawn depends on the seed and the wishes alone: pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from router.core.policies import POLICIES
from simulator.faults.demand.drawing import with_demands
from simulator.faults.demand.shares import USUAL, Shares
from simulator.faults.history import AskedRequest, Fault, History
from simulator.faults.kinds import (
    BETWEEN_TWO,
    BREAKING,
    BREAKS,
    HARMLESS,
    OF_STEPS,
    STORE,
    WAYS,
    FaultKind,
)
from simulator.faults.kv.wires import INLINE_LANE
from simulator.faults.roles.drawing import cut_from_store, led_by_load, over_a_longer_time
from simulator.faults.shape import (
    CARD_LANES,
    HOST_LANES,
    MOST_QUEUED,
    ROUTER,
    Shape,
    node_names,
    router_names,
)

MOST_FAULTS = 6
MOST_CHANGES = 4
NUM_BEGINNINGS = 4
TIMES_LATER = 10.0
LEAST_TOKENS_PER_SEAT = 5
"""Tokens of a step: one for each sequence, with its drafts, and a chunk of a prompt."""
_LATER = (2.0, 4.0, 10.0, 30.0)
_SOON = (4.0, 20.0, 100.0)
_MORE_BREAKS = (0, 0, 1, 3)
_PROMPTS = (1, 3, 4, 5, 8, 9, 16, 17, 30)
_SLOW_STEPS_S = (0.5, *(0.0,) * 24)
"""Durations of steps: a prompt behind slow ones waits longer than an idle reservation is kept."""
_FAILING_STEPS = (0, 0, 0, 1, 2)
_HANGS = (0, 0, 0, 1, 2)
_PRIORITIES = (0, 0, 0, 1, -1, 7)
_SESSIONS = ("", "a", "a", "b", "c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the histories are to have. `num_prefill` and `num_decode` None: drawn too."""

    kinds: tuple[FaultKind, ...]
    num_requests: int
    num_prefill: int | None = None
    num_decode: int | None = None


def draw_history(seed: int, wishes: Wishes, shares: Shares = USUAL) -> History:
    """Return the history of this seed, which has each of its parts in a share of the seeds.

    Its routers, changes, priorities, sessions, further breaks, steps that fail or hang, upgrades,
    roles that follow the load, and where its nodes keep KV, come from random numbers of their own:
    none of them changes the rest of a seed's history.
    """
    rng, more = random.Random(seed), random.Random(f"more of {seed}")
    shape = _shape(rng, more, wishes, shares)
    shape = _on_a_lane(random.Random(f"lane of {seed}"), shape, shares)
    roles = random.Random(f"roles of {seed}")
    if wishes.num_prefill is None and wishes.num_decode is None:
        shape = led_by_load(roles, shape)
    arrivals_end_s = rng.choice((0.1, 0.3, 1.0, 3.0))
    unit_s = 4 * shape.message_s + shape.step_s  # until a request is computed, if nobody waits
    requests = [
        _request(rng, f"r{index}", arrivals_end_s, unit_s) for index in range(wishes.num_requests)
    ]
    breaking = [kind for kind in wishes.kinds if kind in BREAKING and kind not in OF_STEPS]
    changing = [kind for kind in wishes.kinds if kind in HARMLESS and kind is not FaultKind.UPGRADE]
    names, routers = node_names(shape), router_names(shape)
    requests = [_to_any_router(more, one, routers) for one in requests]
    sessions = random.Random(f"sessions of {seed}")
    shape = replace(shape, session_ttl_s=sessions.choice((0.1, 1.0, 60.0)))
    requests = _in_sessions(sessions, requests)
    if shape.keeps_prefixes:
        requests = [_that_comes_back(more, one) for one in requests]
    requests = over_a_longer_time(roles, shape, requests)
    faults: list[Fault] = []
    if breaking:
        faults = [
            _at_any_router(more, _fault(rng, breaking, names, around_s, unit_s), routers)
            for around_s in _times(rng, requests, rng.randint(1, MOST_FAULTS))
        ]
        again = random.Random(f"again of {seed}")
        faults += list(_broken_again(again, faults, breaking, shape.kv_message_s))
    if FaultKind.PARTITION in wishes.kinds:
        faults += list(cut_from_store(roles, shape, requests))
    if FaultKind.UPGRADE in wishes.kinds:
        upgrades = random.Random(f"upgrades of {seed}")
        if upgrades.random() < shares.upgraded:
            faults += _upgrades(upgrades, names, routers, requests)
    if FaultKind.STEP in wishes.kinds:
        steps = random.Random(f"steps of {seed}")
        faults += [
            _failing_steps(steps, names, around_s)
            for around_s in _times(steps, requests, steps.choice(_FAILING_STEPS))
        ]
    if FaultKind.HANG in wishes.kinds:
        hangs = random.Random(f"hangs of {seed}")
        faults += [
            _hung_step(hangs, names, around_s)
            for around_s in _times(hangs, requests, hangs.choice(_HANGS))
        ]
    if changing:
        faults += [
            _change(more, changing, names, routers, around_s)
            for around_s in _times(more, requests, more.randint(0 if breaking else 1, MOST_CHANGES))
        ]
    history = History(
        seed=seed,
        shape=shape,
        requests=tuple(sorted(requests, key=lambda one: one.at_s)),
        faults=tuple(sorted(faults, key=lambda one: one.at_s)),
    )
    return with_demands(history, shares)


def _times(rng: random.Random, requests: Sequence[AskedRequest], count: int) -> Iterator[float]:
    """Yield times at which requests arrive, so that some request is in progress."""
    return (rng.choice(requests).at_s for _ in range(count))


def _at_any_router(rng: random.Random, fault: Fault, routers: Sequence[str]) -> Fault:
    """Return the fault; one that is to be at the first router may be at any."""
    return fault if fault.target != ROUTER else replace(fault, target=rng.choice(routers))


def _broken_again(
    rng: random.Random,
    faults: Sequence[Fault],
    kinds: Sequence[FaultKind],
    kv_message_s: float,
) -> Iterator[Fault]:
    """Yield further breaks, of these kinds, of connections soon after they broke.

    Frames that were sent again are then on their way, or have just arrived.
    """
    breaks = [kind for kind in kinds if kind in BREAKS]
    for fault in faults:
        at_s = fault.at_s
        for _ in range(rng.choice(_MORE_BREAKS) if fault.kind in BREAKS else 0):
            at_s += rng.choice(_SOON) * rng.random() * kv_message_s
            yield replace(fault, at_s=round(at_s, 4), kind=rng.choice(breaks))


def _to_any_router(rng: random.Random, asked: AskedRequest, routers: Sequence[str]) -> AskedRequest:
    return replace(asked, router=rng.choice(routers), priority=rng.choice(_PRIORITIES))


def _in_sessions(rng: random.Random, requests: Sequence[AskedRequest]) -> list[AskedRequest]:
    """Return the requests, in half of the histories most of them with one of three sessions."""
    if rng.random() < 0.5:
        return list(requests)
    return [replace(one, session=rng.choice(_SESSIONS)) for one in requests]


def _that_comes_back(rng: random.Random, asked: AskedRequest) -> AskedRequest:
    """Return the request with one of some long beginnings, of which pools do not hold all.

    More time is between them: others have evicted what comes back.
    """
    num_prompt = rng.choice((22, 30, 30))
    return replace(
        asked.later((TIMES_LATER - 1) * asked.at_s),
        num_prompt=num_prompt,
        group=rng.randrange(NUM_BEGINNINGS),
        num_shared=rng.choice((num_prompt - 1, 16)),
    )


def _failing_steps(rng: random.Random, names: Sequence[str], around_s: float) -> Fault:
    return Fault(
        at_s=round(around_s + rng.choice((0.0, 0.02, 0.1, 0.5)) * rng.random(), 4),
        kind=FaultKind.STEP,
        target=rng.choice(names),
        span_s=rng.choice((0.01, 0.1, 1.0)),
        how=rng.choice(WAYS[FaultKind.STEP]),
    )


def _hung_step(rng: random.Random, names: Sequence[str], around_s: float) -> Fault:
    return Fault(
        at_s=round(around_s + rng.choice((0.0, 0.02, 0.1, 0.5)) * rng.random(), 4),
        kind=FaultKind.HANG,
        target=rng.choice(names),
        span_s=rng.choice((0.5, 3.0, 8.0, 20.0)),
        how="",
    )


def _upgrades(
    rng: random.Random,
    names: Sequence[str],
    routers: Sequence[str],
    requests: Sequence[AskedRequest],
) -> list[Fault]:
    """Return a rolling upgrade of all nodes or some; a few go back."""
    order = rng.sample(list(names), rng.choice((len(names), rng.randint(1, len(names)))))
    order += rng.sample(list(names), rng.choice((0, 0, 1)))
    at_s, pause_s = rng.choice(requests).at_s, rng.choice((0.1, 0.5, 2.0, 6.0))
    found = []
    for number, name in enumerate(order):
        found.append(
            Fault(
                at_s=round(at_s, 4),
                kind=FaultKind.UPGRADE,
                target=name,
                other=rng.choice(routers),
                span_s=rng.choice((0.05, 0.5, 3.0)),
                how="new" if number == order.index(name) else "old",
            )
        )
        at_s += pause_s * (0.5 + rng.random())
    return found


def _change(
    rng: random.Random,
    kinds: Sequence[FaultKind],
    names: Sequence[str],
    routers: Sequence[str],
    around_s: float,
) -> Fault:
    """Return a change, which breaks nothing, soon after `around_s`."""
    kind = rng.choice(kinds)
    spans_s: tuple[float, ...] = (0.0,)
    if kind is FaultKind.DRAIN:
        spans_s = (0.0, 0.05, 0.5, 3.0)
    elif kind is FaultKind.DISK:
        spans_s = (0.01, 0.1, 1.0, 10.0)
    return Fault(
        at_s=round(around_s + rng.choice((0.0, 0.02, 0.1, 0.5)) * rng.random(), 4),
        kind=kind,
        target=rng.choice(names),
        other="" if kind is FaultKind.DISK else rng.choice(routers),
        span_s=rng.choice(spans_s),
        how=rng.choice(WAYS[kind]),
    )


def _on_a_lane(rng: random.Random, shape: Shape, shares: Shares) -> Shape:
    """Return the shape with the lane of its KV. On some of them caches are on cards."""
    (lane,) = rng.choices(list(shares.lanes), list(shares.lanes.values()))
    is_staged = shape.is_staged and lane not in CARD_LANES
    is_on_card = rng.random() < shares.on_card and not is_staged and lane not in HOST_LANES
    has_further = rng.random() < shares.further and lane == INLINE_LANE
    num_kv_lanes = rng.choice((2, 3)) if has_further else 1
    return replace(
        shape, lane=lane, is_staged=is_staged, is_on_card=is_on_card, num_kv_lanes=num_kv_lanes
    )


def _shape(rng: random.Random, more: random.Random, wishes: Wishes, shares: Shares) -> Shape:
    is_mixed = wishes.num_prefill is None and rng.random() < 0.1
    num_prefill = rng.choice((1, 1, 2)) if wishes.num_prefill is None else wishes.num_prefill
    num_decode = rng.choice((1, 2, 2)) if wishes.num_decode is None else wishes.num_decode
    max_num_seqs = rng.choice((2, 4, 8, 8))
    num_mixed = rng.choice((1, 2)) if is_mixed else 0
    num_blocks, num_host_blocks = rng.choice((16, 18, 24, 40)), rng.choice((0, 8, 30))
    keeps_prefixes = num_host_blocks > 0 and more.random() < 0.5
    num_disk_blocks = more.choice((0, 0, 6, 30)) if keeps_prefixes else 0
    if keeps_prefixes:  # little, so that what comes back has left
        num_blocks = more.choice((16, 18, num_blocks))
        num_host_blocks = more.choice((8, 12)) if num_disk_blocks else num_host_blocks
    return Shape(
        num_routers=more.choice((1, 1, 2, 3)),
        lane=INLINE_LANE,
        num_prefill=0 if is_mixed else num_prefill,
        num_decode=0 if is_mixed else num_decode,
        num_mixed=num_mixed,
        num_blocks=num_blocks,
        pools=(),
        num_host_blocks=num_host_blocks,
        num_disk_blocks=num_disk_blocks,
        block_size=4,
        keeps_prefixes=keeps_prefixes,
        is_staged=more.random() < shares.staged,
        is_on_card=False,
        is_warmed=more.random() < 0.4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(rng.choice((16, 32, 64)), LEAST_TOKENS_PER_SEAT * max_num_seqs),
        max_queued=MOST_QUEUED,
        sheds=False,
        local_prefill_threshold=rng.choice((0, 0, 4, 8)),
        has_priorities=more.random() < 0.5,
        preemption_policy=more.choice(("last_in_first_out", "shortest_output", "priority")),
        preemption_mode=rng.choice(("recompute", "swap")),
        reservation_policy=rng.choice(("learned", "none", "token_ratio")),
        speculative_method=rng.choice(("none", "ngram")),
        placement_policy=rng.choice(tuple(POLICIES)),
        session_ttl_s=60.0,
        target_ttft_s=0.0,
        target_tpot_s=0.0,
        lease_s=rng.choice((2.0, 4.0)),
        kv_lease_s=more.choice((3.0, 30.0)),
        drain_s=more.choice((0.02, 0.2, 1.0, 5.0)),
        message_s=rng.choice((0.2e-3, 1e-3, 5e-3)),
        kv_message_s=rng.choice((0.1e-3, 1e-3, 4e-3, 15e-3)),
        step_s=max(rng.choice((2e-3, 10e-3, 30e-3)), more.choice(_SLOW_STEPS_S)),
    )


def _request(rng: random.Random, name: str, arrivals_end_s: float, unit_s: float) -> AskedRequest:
    num_prompt = rng.choice(_PROMPTS)
    at_s = round(rng.random() * arrivals_end_s, 4)
    leaves_s = rng.choice(_LATER) * rng.random() * unit_s
    return AskedRequest(
        at_s=at_s,
        name=name,
        num_prompt=num_prompt,
        group=rng.randrange(3),
        num_shared=min(num_prompt, rng.choice((0, 4, 8, 12, 30))),
        max_tokens=rng.choice((1, 2, 3, 5, 9, 24)),
        seed=rng.randrange(4),
        deadline_s=rng.choice((round(rng.choice(_LATER) * unit_s, 4), 2.0, *(60.0,) * 8)),
        leaves_at_s=round(at_s + leaves_s, 4) if rng.random() < 0.15 else None,
    )


def _fault(
    rng: random.Random,
    kinds: Sequence[FaultKind],
    names: Sequence[str],
    around_s: float,
    unit_s: float,
) -> Fault:
    """Return a fault soon after `around_s`, at which a request has arrived."""
    kind = rng.choice(kinds)
    target, other = rng.choice(names), ""
    if kind is FaultKind.STORE:
        target = STORE
    elif kind is FaultKind.CLOCK:
        target = rng.choice((*names, STORE))
    elif kind in BETWEEN_TWO:
        target, other = rng.choice(_pairs(names))
    elif rng.random() < 0.1:
        target = ROUTER
    ways = WAYS[kind]
    if target == ROUTER and kind is FaultKind.CRASH:
        ways = ("known", "silent")
    return Fault(
        at_s=round(around_s + rng.choice(_LATER) * rng.random() * unit_s, 4),
        kind=kind,
        target=target,
        other=other,
        span_s=round(_span_s(rng, kind, target), 4),
        how=rng.choice(ways),
    )


def _span_s(rng: random.Random, kind: FaultKind, target: str) -> float:
    spans_s: tuple[float, ...]
    match kind:
        case FaultKind.LOSS | FaultKind.REPEAT:
            spans_s = (0.0,)
        case FaultKind.CRASH:
            spans_s = (0.05, 0.5, 3.0) if target == ROUTER else (0.0, 0.05, 0.5, 3.0)
        case FaultKind.STORE:
            spans_s = (1.0, 5.0, 12.0)
        case _:
            spans_s = (0.005, 0.05, 0.4, 2.0, 7.0)
    return rng.choice(spans_s)


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs that have connections: the router with each node, and nodes for KV."""
    pairs = [(ROUTER, name) for name in names]
    for one in names:
        others = [other for other in names if other != one and not other.startswith("prefill")]
        if one.startswith("prefill"):
            pairs += 2 * [(one, other) for other in others]
    return pairs
