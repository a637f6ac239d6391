"""Which node has more of a prompt than the prefill node that is to compute it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from common.kv.tiers import Tier
from common.nodes import Role
from router.core.known.block_index import BlockIndex
from router.core.known.block_reports import BlockReport
from router.core.known.node_view import NodeView
from router.core.placement import Placer
from router.core.prefix_sources import (
    WAIT_S,
    Settled,
    WarmWishes,
    heir_of,
    prefix_source,
    warm_source_of,
)
from tests.support.nodes.node_views import node, prefill, query

P0, P1, D0, D1 = (Incarnation(name, 1) for name in ("p0", "p1", "d0", "d1"))
PROMPT = query(num_tokens=40)
"""Ten blocks."""
LONG_ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


def source(nodes: list[NodeView], depths: dict[str, int], decode: Incarnation | None = D0) -> Any:
    """The source for `p0`, which is the first of the nodes, when each has so many blocks."""
    index, keys = BlockIndex(), PROMPT.block_keys(nodes[0].record)
    for name, depth in depths.items():
        index.on_report(Incarnation(name, 1), keys[:depth], [])
    in_memory = partial(index.num_in_memory, keys)
    found = prefix_source(nodes, nodes[0], decode, index.held(keys, to_send=True), in_memory)
    return None if found is None else (found.node.node_id, found.num_tokens)


@pytest.mark.parametrize(
    ("depths", "expected"),
    [
        ({}, None),
        ({"p0": 10, "p1": 10, "d0": 10}, None),
        ({"p0": 5, "p1": 4}, None),
        ({"p1": 1}, ("p1", 4)),
        ({"p0": 5, "p1": 6, "d1": 5}, ("p1", 24)),
        ({"p0": 5, "p1": 6, "d1": 7}, ("d1", 28)),
        ({"p1": 6, "d0": 6, "d1": 6}, ("d0", 24)),
        ({"gone": 9, "d1": 6}, ("d1", 24)),
        ({"gone": 9}, None),
    ],
)
def test_the_node_with_the_most_is_named(depths: dict[str, int], expected: object) -> None:
    nodes = [prefill("p0"), prefill("p1"), node("d0"), node("d1")]
    assert source(nodes, depths) == expected


def test_of_equals_the_one_with_the_least_to_do_is_named() -> None:
    nodes = [prefill("p0"), prefill("p1", queued_tokens=900), node("d0"), node("d1")]
    assert source(nodes, {"p1": 6, "d1": 6}) == ("d1", 24)
    assert source(nodes, {"p1": 6, "d1": 6, "d0": 6}) == ("d0", 24)
    nodes[3] = node("d1", num_requests=9, queued_tokens=9000)
    assert source(nodes, {"p1": 6, "d1": 6}) == ("p1", 24)
    assert source(nodes, {"p1": 6, "d0": 6}, decode=None) == ("d0", 24)


@pytest.mark.parametrize("num_queued", [0, 900])
def test_it_is_said_what_the_source_has_to_compute(num_queued: int) -> None:
    placer = Placer("least_loaded")
    nodes = [node("d0"), prefill("p0"), prefill("p1", queued_tokens=num_queued)]
    keys = PROMPT.block_keys(nodes[1].record)
    placer.on_blocks(P1, BlockReport(is_first=True, added=keys))
    placer.on_blocks(D0, BlockReport(is_first=True, added=keys[:4]))
    chosen = placer.choose(nodes, PROMPT, frozenset({P1}))
    assert chosen.source == PrefixSource(P1, 40, num_queued_tokens=num_queued)


def test_of_equals_the_one_with_the_most_in_memory_is_named_with_what_it_reads() -> None:
    placer = Placer("least_loaded")
    nodes = [node("d0"), prefill("p0"), prefill("p1", queued_tokens=900), prefill("p2")]
    keys = PROMPT.block_keys(nodes[1].record)

    def report(name: str, num: int, tier: Tier) -> None:
        told = BlockReport(is_first=tier is Tier.POOL, added=keys[:num], tier=tier)
        placer.on_blocks(Incarnation(name, 1), told)

    def source_of_p0() -> PrefixSource | None:
        return placer.choose(nodes, PROMPT, frozenset({Incarnation("p2", 1), P1})).source

    report("d0", 10, Tier.DISK)
    assert source_of_p0() == PrefixSource(D0, 40, 40)
    report("p1", 6, Tier.POOL)
    assert source_of_p0() == PrefixSource(D0, 40, 40)
    report("p1", 8, Tier.HOST)
    report("p1", 10, Tier.DISK)
    assert source_of_p0() == PrefixSource(P1, 40, 8, 900)
    report("d0", 9, Tier.HOST)
    assert source_of_p0() == PrefixSource(D0, 40, 4)
    report("p1", 10, Tier.HOST)
    assert source_of_p0() == PrefixSource(P1, 40, 0, 900)
    report("p0", 10, Tier.DISK)
    assert source_of_p0() is None, "it has as much on its own disk"


@pytest.mark.parametrize(
    "why",
    [
        {"sends_blocks": False},
        {"is_draining": True},
        {"is_suspected": True},
        {"fingerprint": "other"},
        {"kv_protocol": 5},
        {"kv_unreachable": (P0,)},
    ],
)
def test_a_node_that_cannot_send_to_it_is_not_named(why: dict[str, Any]) -> None:
    nodes = [prefill("p0"), prefill("p1", **why), node("d1")]
    assert source(nodes, {"p1": 9, "d1": 3}) == ("d1", 12)
    assert source(nodes, {"p1": 9}) is None


def test_only_what_was_reported_counts_also_right_after_a_placement() -> None:
    placer = Placer("round_robin")
    nodes = [node("d0"), prefill("p0"), prefill("p1")]
    first = placer.choose(nodes, PROMPT, frozenset())
    assert (first.prefill, first.source) == (P0, None)
    second = placer.choose(nodes, PROMPT, frozenset())
    assert (second.prefill, second.source) == (P1, None), "p0 has not computed it yet"
    keys = PROMPT.block_keys(nodes[1].record)
    placer.on_blocks(P0, BlockReport(is_first=True, added=keys))
    again = {one.prefill: one.source for one in _choices(placer, nodes, 2)}
    assert again == {P0: None, P1: PrefixSource(P0, 40)}
    other = placer.choose_prefill(nodes, PROMPT, D0, frozenset({P0}))
    assert (other.prefill, other.source) == (P1, PrefixSource(P0, 40))
    placer.on_lost(P0)
    assert all(one.source is None for one in _choices(placer, nodes, 2))


def test_of_a_long_prompt_the_node_with_all_of_it_is_named() -> None:
    """The last turns of long sessions are long: both nodes have what is in front of them."""
    prompt = query(num_tokens=4 * 1500)
    nodes = [node(name, role, max_model_len=10_000) for name, role in LONG_ROLES.items()]
    placer = Placer("prefix_affinity")
    keys = prompt.block_keys(nodes[0].record)
    for name, depth in {"p0": 600, "p1": 1400, "d0": 600, "d1": 700}.items():
        placer.on_blocks(Incarnation(name, 1), BlockReport(is_first=True, added=keys[:depth]))
    chosen = placer.choose(nodes, prompt, frozenset())
    assert (chosen.prefill, chosen.source) == (P1, None), "it has the least to compute"
    chosen = placer.choose(nodes, prompt, frozenset({P1}))
    assert (chosen.prefill, chosen.source) == (P0, PrefixSource(P1, 4 * 1400))


def test_a_prompt_for_one_token_has_a_source_and_local_ones_have_none() -> None:
    placer = Placer("least_loaded")
    nodes = [node("d0"), prefill("p0"), prefill("p1", queued_tokens=500)]
    keys = PROMPT.block_keys(nodes[1].record)
    placer.on_blocks(P1, BlockReport(is_first=True, added=keys))
    one = placer.choose(nodes, query(num_tokens=40, max_tokens=1), frozenset())
    assert (one.decode, one.prefill, one.source) == (None, P0, PrefixSource(P1, 40, 0, 500))


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
def test_a_node_that_computes_the_prompt_itself_has_a_source_too(role: Role) -> None:
    placer = Placer("least_loaded")
    alone = node("m0", role)
    assert placer.choose([alone], PROMPT, frozenset()).source is None
    draining = node("d9", role, is_suspected=True)
    holder = draining.incarnation
    keys = PROMPT.block_keys(alone.record)
    placer.on_blocks(holder, BlockReport(is_first=True, added=keys))
    chosen = placer.choose([alone, draining], PROMPT, frozenset())
    assert (chosen.decode, chosen.prefill, chosen.source) == (alone.incarnation, None, None)
    busy = node("d9", role, queued_tokens=10_000)
    chosen = placer.choose([alone, busy], PROMPT, frozenset())
    assert (chosen.decode, chosen.prefill) == (alone.incarnation, None)
    size = alone.record.block_size
    assert chosen.source == PrefixSource(holder, len(keys) * size, 0, 10_000)


@pytest.mark.parametrize(
    ("nodes", "heir"),
    [
        ([], None),
        ([node("d1")], None),
        ([node("d1"), node("m0", Role.MIXED)], "m0"),
        ([prefill("p0", queued_tokens=900), node("m0", Role.MIXED)], "p0"),
        ([prefill("p0", queued_tokens=900), prefill("p1")], "p1"),
        ([prefill("p0"), prefill("p1")], "p0"),
        ([prefill("p0", is_draining=True), prefill("p1", queued_tokens=900)], "p1"),
        ([prefill("p0", is_suspected=True)], "p0"),
        ([prefill("p0", is_suspected=True), prefill("p1", queued_tokens=900)], "p1"),
        ([prefill("p0", is_suspected=True), node("m0", Role.MIXED)], "m0"),
        ([prefill("p0", sends_blocks=False)], None),
        ([prefill("p0", fingerprint="other"), prefill("p1", kv_protocol=5)], None),
    ],
)
@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_one_node_that_computes_prompts_takes_over_what_a_node_has(
    nodes: list[NodeView], heir: str | None, role: Role
) -> None:
    leaving = node("leaving", role, is_draining=True)
    found = heir_of(leaving.incarnation, [*nodes, leaving])
    assert (None if found is None else found.node_id) == heir


NEW = prefill("p9")


@pytest.mark.parametrize(
    ("nodes", "wanted", "source"),
    [
        ([], "auto", None),
        ([prefill("p0")], "auto", None),
        ([prefill("p0", num_cached_blocks=1)], "auto", "p0"),
        ([prefill("p0", num_cached_blocks=1), prefill("p1", num_cached_blocks=9)], "auto", "p1"),
        ([prefill("p0", num_cached_blocks=1), node("d1", num_cached_blocks=9)], "auto", "p0"),
        ([prefill("p0"), node("d1", num_cached_blocks=9)], "auto", "d1"),
        ([prefill("p0", num_cached_blocks=9, is_draining=True)], "auto", None),
        ([prefill("p0", num_cached_blocks=9, is_suspected=True)], "auto", "p0"),
        ([prefill("p0", is_suspected=True), prefill("p1")], "p0", "p0"),
        ([prefill("p0", is_suspected=True, is_draining=True)], "p0", None),
        (
            [
                prefill("p0", num_cached_blocks=9, is_suspected=True),
                node("d1", num_cached_blocks=1),
            ],
            "auto",
            "d1",
        ),
        ([prefill("p0", num_cached_blocks=9, sends_blocks=False)], "auto", None),
        ([prefill("p0", num_cached_blocks=9, fingerprint="other")], "auto", None),
        ([prefill("p0", num_cached_blocks=9, kv_unreachable=(NEW.incarnation,))], "auto", None),
        (  # it has room for 50
            [
                prefill("p0", num_cached_blocks=60),
                prefill("p1", num_cached_blocks=90, queued_tokens=900),
            ],
            "auto",
            "p0",
        ),
        ([prefill("p0"), prefill("p1", num_cached_blocks=9)], "p0", "p0"),
        ([prefill("p0", fingerprint="other"), prefill("p1")], "p0", None),
        ([prefill("p1")], "p0", None),
        ([prefill("p1")], "p9", None),
    ],
)
def test_which_node_warms_a_new_one(nodes: list[NodeView], wanted: str, source: str | None) -> None:
    found = warm_source_of(NEW.incarnation, [*nodes, NEW], wanted)
    assert (None if found is None else found.node_id) == source
    assert warm_source_of(NEW.incarnation, nodes, wanted) is None, "it has left again"


OLD = prefill("p0", num_cached_blocks=9)


def settle(
    wanted: str, heard: list[NodeView], unheard: list[NodeView], *at_s: float
) -> list[list[Settled]]:
    """What a wish at 5 s ends in, by each of these times."""
    wishes = WarmWishes()
    wishes.add(NEW.incarnation, wanted, 5.0)
    records = [one.record for one in (*heard, *unheard)]
    settled = [wishes.settle(heard, records, now_s) for now_s in at_s]
    assert len(wishes) == (not any(settled))
    return settled


@pytest.mark.parametrize("wanted", ["p0", "auto"])
def test_a_new_node_waits_for_one_that_is_not_heard(wanted: str) -> None:
    warm, cold = Settled(NEW.incarnation, wanted, P0), Settled(NEW.incarnation, wanted, None)
    assert settle(wanted, [NEW, OLD], [], 5.0, 6.0) == [[warm], []]
    in_time, late = 4.0 + WAIT_S, 5.0 + WAIT_S
    assert settle(wanted, [NEW], [OLD], 5.0, in_time, late, late) == [[], [], [cold], []]
    assert settle(wanted, [OLD], [NEW], in_time, late) == [[], [cold]], "it is not heard itself"
    wishes, records = WarmWishes(), [NEW.record, OLD.record]
    wishes.add(NEW.incarnation, wanted, 5.0)
    assert wishes.settle([NEW], records, 6.0) == []
    assert wishes.settle([NEW, OLD], records, 7.0) == [warm]


@pytest.mark.parametrize(
    ("wanted", "heard", "unheard", "waits"),
    [
        ("p7", [OLD], [], True),
        ("p7", [OLD], [prefill("p1")], True),
        ("p0", [prefill("p0", is_draining=True)], [prefill("p1")], False),
        ("p0", [prefill("p0", fingerprint="other")], [], False),
        ("p0", [], [prefill("p0", fingerprint="other")], False),
        ("p0", [], [prefill("p0", sends_blocks=False)], False),
        ("auto", [prefill("p0")], [], False),
        ("auto", [prefill("p0")], [prefill("p1")], True),
        ("auto", [], [prefill("p1", fingerprint="other")], False),
        ("auto", [], [], False),
        (NEW.record.node_id, [OLD], [], False),
    ],
)
def test_it_waits_for_none_that_cannot_send(
    wanted: str, heard: list[NodeView], unheard: list[NodeView], waits: bool
) -> None:
    found = [] if waits else [Settled(NEW.incarnation, wanted, None)]
    assert settle(wanted, [NEW, *heard], unheard, 5.0) == [found]


def test_a_new_node_that_is_lost_wants_nothing() -> None:
    wishes = WarmWishes()
    wishes.add(NEW.incarnation, "p0", 5.0)
    wishes.forget(P0)
    assert len(wishes) == 1
    wishes.forget(NEW.incarnation)
    assert wishes.settle([NEW, OLD], [NEW.record, OLD.record], 6.0) == []


def test_a_node_that_does_not_reach_it_leaves_it_nothing() -> None:
    leaving = node("leaving", is_draining=True, kv_unreachable=(P0,))
    assert heir_of(leaving.incarnation, [prefill("p0"), leaving]) is None
    assert heir_of(leaving.incarnation, [prefill("p0"), prefill("p1"), leaving]) == P1
    assert heir_of(Incarnation("leaving", 9), [prefill("p0"), leaving]) is None
    assert heir_of(P0, [prefill("p0")]) is None, "it draws no blocks from itself"


def _choices(placer: Placer, nodes: list[NodeView], count: int) -> list[Any]:
    return [placer.choose(nodes, PROMPT, frozenset()) for _ in range(count)]
