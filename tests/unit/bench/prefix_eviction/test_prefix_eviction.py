"""Orders of eviction on traces small enough to know what must come out."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from bench.agents.sessions import Shape
from bench.prefix_eviction.__main__ import measure
from bench.prefix_eviction.chains import BLOCK_TOKENS, Chain, of_agents, of_trace
from bench.prefix_eviction.orders import ORDERS, Order, Use
from bench.prefix_eviction.tiers import Kept, Tiers, cost, next_uses, replay
from engine.core.blocks.leaving_blocks import USE_PAYS
from simulator.trace_file import TraceRequest

WORTHLESS = Use(1.0, math.inf)


def filled(name: str, *blocks: int) -> Order:
    order = ORDERS[name](len(blocks))
    for block in blocks:
        order.use(block, WORTHLESS)
    return order


def emptied(order: Order) -> list[int]:
    return [order.evict() for _ in range(len(order))]


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_not_used_again_leaves_as_it_came(name: str) -> None:
    order = filled(name, 5, 3, 8)
    assert [block in order for block in (5, 3, 8, 9)] == [True, True, True, False]
    assert emptied(order) == [5, 3, 8]
    assert len(order) == 0


@pytest.mark.parametrize("name", ORDERS)
def test_a_tier_that_evicts_and_uses_at_random_holds_each_block_once(name: str) -> None:
    rng, order, held = random.Random(name), ORDERS[name](20), set[int]()
    for _ in range(3000):
        block = rng.randrange(60)
        order.use(block, Use(rng.random(), rng.randrange(100)))
        held.add(block)
        if len(order) > 20:
            held.remove(order.evict())
        assert len(order) == len(held)
    assert all((block in order) == (block in held) for block in range(60))


def test_the_orders_differ_in_what_they_keep() -> None:
    lru = filled("lru", 1, 2, 3)
    lru.use(1, WORTHLESS)
    assert emptied(lru) == [2, 3, 1]
    fifo = filled("s3_fifo", *range(20))
    fifo.use(0, WORTHLESS)
    assert fifo.evict() == 1, "what was used there passes through the short queue"
    fifo.use(1, WORTHLESS)
    assert emptied(fifo)[-3:] == [0, 1, 19], "what comes back soon is not new"
    segmented = ORDERS["segmented"](10)
    for block in range(10):
        segmented.use(block, Use(1.0, math.inf, is_again=block < 7))
    segmented.copy_back(5, WORTHLESS)
    segmented.use(8, Use(1.0, math.inf, is_again=False))
    assert emptied(segmented) == [5, 7, 0, 1, 2, 3, 4, 6, 8, 9]
    costly = ORDERS["cost_times_chance"](3)
    for block, worth in ((1, 9.0), (2, 1.0), (3, 2.0)):
        costly.use(block, Use(worth, math.inf))
    assert costly.evict() == 2
    costly.use(2, Use(1.5, math.inf))
    assert emptied(costly) == [3, 2, 1], "what is used now is worth more than that was then"
    known = ORDERS["known_future"](3)
    for block, next_use in ((1, 7), (2, math.inf), (3, 9)):
        known.use(block, Use(1.0, next_use))
    assert emptied(known) == [2, 3, 1]


def hits(chains: Sequence[Chain], tiers: Tiers) -> list[int]:
    uses = next_uses(chains)
    return [tiers.ask(chain, uses[number]) for number, chain in enumerate(chains)]


A, B, C = (1, 2, 3), (11, 12, 13), (21, 22, 23)


@pytest.mark.parametrize(
    ("kept", "chains", "found"),
    [
        (Kept.FOUND, (A, A, B, C, A), [0, 3, 0, 0, 3]),
        (Kept.FOUND, (A, B, C, A, B, C, A), [0, 0, 0, 0, 0, 0, 0]),
        (Kept.USED_TWICE, (A, B, C, A, B, C, A), [0, 0, 0, 0, 0, 0, 3]),
        (Kept.ALL, (A, B, A), [0, 0, 3]),
        (Kept.PAID, (A, B, A), [0, 0, 0]),
        (Kept.PAID, (A, A, B, C, B, A), [0, 3, 0, 0, 3, 3]),
        (Kept.ALL, ((1, 2, 3), (1, 2, 4), (1, 2, 3)), [0, 2, 3]),
    ],
)
def test_a_tier_keeps_what_its_rule_says(
    kept: Kept, chains: Sequence[Chain], found: list[int]
) -> None:
    assert hits(chains, Tiers(3, 30, ORDERS["lru"](30), kept)) == found


def test_a_use_pays_for_keeping_some_blocks_that_were_used_once() -> None:
    tiers = Tiers(3, 300, ORDERS["lru"](300), Kept.PAID)
    once = [(100 + 3 * n, 101 + 3 * n, 102 + 3 * n) for n in range(2 * USE_PAYS)]
    hits((A, A, *once), tiers)
    assert sum(hits([one], tiers)[0] > 0 for one in once[:USE_PAYS]) == USE_PAYS
    again = Tiers(3, 300, ORDERS["lru"](300), Kept.PAID)
    hits((A, A, *once), again)
    assert hits([once[USE_PAYS + 2]], again) == [0]


def test_a_prefix_is_found_up_to_its_first_missing_block() -> None:
    tiers = Tiers(3, 2, ORDERS["lru"](2), Kept.ALL)
    assert hits((A, B, A), tiers) == [0, 0, 2], "the end of a prompt goes before its beginning"


def test_shares_are_of_tokens_and_of_cost() -> None:
    found = replay((A, (1, 2, 9)), Tiers(9, 0, ORDERS["lru"](0), Kept.FOUND))
    assert found.tokens == 2 / 6
    assert found.cost == pytest.approx((cost(0) + cost(1)) / (2 * (cost(0) + cost(1) + cost(2))))
    assert cost(2) > cost(1) > cost(0) == 1.0


def test_next_uses_are_those_of_later_requests() -> None:
    assert next_uses(((1, 2), (3,), (1,))) == [[2, math.inf], [math.inf], [math.inf]]


def test_a_trace_has_full_blocks_only() -> None:
    request = TraceRequest(0.0, 2 * BLOCK_TOKENS + 1, 5, (7, 8, 9))
    assert of_trace([request]) == [(7, 8)]


def test_agents_ask_again_with_what_they_were_answered() -> None:
    shape = Shape(num_sessions=4, num_turns=5, system_tokens=1100, new_tokens=700, branch_share=0.3)
    chains = of_agents(shape, 3)
    assert chains == of_agents(shape, 3)
    assert len(chains) == 20
    assert {chain[:2] for chain in chains} == {chains[0][:2]}, "one system prompt"
    found = replay(chains, Tiers(10_000, 0, ORDERS["lru"](0), Kept.FOUND))
    longest = sum(
        max(len(c) for c in chains if c[2:3] == first) for first in {c[2:3] for c in chains}
    )
    num_new = round((1 - found.tokens) * sum(map(len, chains)))
    assert longest - 2 * 3 <= num_new <= 1.5 * longest


def test_the_command_compares_every_order_and_rule() -> None:
    found = measure([A, B, A, B, A], 3, [1, 3])
    assert found.keys() == {"pool", *(f"{n} x {kept.value}" for n in (1, 3) for kept in Kept)}
    everything = found["3 x all"]
    assert isinstance(everything, dict)
    assert everything.keys() == ORDERS.keys()
    assert everything["lru"]["tokens"] == 0.6
    with pytest.raises(SystemExit, match="wanted 3 or more"):
        measure([A], 2, [1])
