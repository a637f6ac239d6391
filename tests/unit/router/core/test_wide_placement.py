"""Choices in a cluster that is too wide to look at every node."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from common.errors import InvalidRequest, Overloaded
from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from common.nodes import Role
from router.core.known.block_reports import BlockReport
from router.core.known.node_view import NodeView
from router.core.known.roster import Roster
from router.core.known.sessions import SessionNodes
from router.core.placement import Placer
from router.core.policies import NARROWINGS, POLICIES
from router.core.policies.query import Query
from router.core.shortlist import (
    MAX_HOLDERS_SEEN,
    MAX_SCANNED,
    NUM_DRAWN,
    NUM_HOLDERS,
    SeededDraws,
)
from tests.support.nodes.node_views import names, node, prefill, query

NOBODY: frozenset[Incarnation] = frozenset()
NUM_NODES = 200


def decoders(number: int = NUM_NODES, **facts: object) -> list[NodeView]:
    return [node(f"d{n:03}", **facts) for n in range(number)]  # type: ignore[arg-type]


def prefillers(number: int = NUM_NODES, **facts: object) -> list[NodeView]:
    return [prefill(f"p{n:03}", **facts) for n in range(number)]


def me(name: str) -> Incarnation:
    return Incarnation(name, 1)


class Looked(Roster):
    """A roster that counts the views that are taken from it."""

    def __init__(self, views: Sequence[NodeView]) -> None:
        self.num_looked_at = 0
        super().__init__(views)

    def view(self, node: Incarnation) -> NodeView | None:
        self.num_looked_at += 1
        return super().view(node)

    def views(self, nodes: Iterable[Incarnation]) -> list[NodeView]:
        found = super().views(nodes)
        self.num_looked_at += len(found)
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.num_looked_at += len(self)
        return super().__iter__()


def any_cluster(rng: random.Random, num_nodes: int) -> list[NodeView]:
    return [
        node(
            f"n{n}",
            rng.choice([Role.PREFILL, Role.DECODE, Role.MIXED]),
            num_requests=rng.randrange(12),
            queued_tokens=rng.randrange(900),
            fingerprint=rng.choice("ffg"),
            is_draining=rng.random() < 0.1,
            is_suspected=rng.random() < 0.1,
        )
        for n in range(num_nodes)
    ]


def outcome(placer: Placer, nodes: Sequence[NodeView], *asked: object) -> object:
    try:
        return placer.choose(nodes, *asked)  # type: ignore[arg-type]
    except (Overloaded, InvalidRequest) as refusal:
        return type(refusal), str(refusal)


@pytest.mark.parametrize("policy", POLICIES)
def test_in_a_small_cluster_every_node_is_looked_at(policy: str) -> None:
    """The same choices, reasons and refusals as of a list, which is always looked at whole."""
    rng = random.Random(5)
    for _ in range(40):
        views = any_cluster(rng, rng.randrange(MAX_SCANNED + 1))
        whole, kept = Placer(policy), Placer(policy, seed=rng.randrange(99))
        for number in range(12):
            asked = query(rng.choice([16, 400]), rng.choice([1, 8]), first=100 * (number % 5))
            tried = frozenset(view.incarnation for view in views if rng.random() < 0.1)
            avoided = frozenset({(me("n0"), me("n1")), (me("n2"), me("n3"))})
            wanted = outcome(whole, views, asked, tried, avoided)
            assert outcome(kept, Roster(views), asked, tried, avoided) == wanted


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wide_cluster_is_not_looked_at_whole(policy: str) -> None:
    placer = Placer(policy)
    for num_nodes in (50, 1000):
        roster = Looked([*decoders(num_nodes), *prefillers(num_nodes)])
        for number in range(20):
            pair = names(placer.choose(roster, query(first=900 * (number % 3)), NOBODY))
            assert None not in pair
        most = 2 * (NUM_DRAWN + NUM_HOLDERS)
        assert roster.num_looked_at <= 20 * most
        roster.num_looked_at = 0
        again = placer.choose_prefill(roster, query(), me("d001"), {me("p001")})
        assert again.prefill not in (None, me("p001"))
        assert roster.num_looked_at <= most + 1


@pytest.mark.covers("F138")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_tried", [False, True])
def test_an_answer_goes_on_in_its_layout_though_few_nodes_have_it(
    policy: str, is_tried: bool
) -> None:
    old = [node("d500", num_requests=9), node("d501", num_requests=9)]
    roster = Roster([*decoders(fingerprint="new"), *prefillers(fingerprint="new"), *old])
    request, placer = query(), Placer(policy)
    request.layout = "f"
    tried = {one.incarnation for one in old} if is_tried else NOBODY
    for _ in range(20):
        chosen = placer.choose(roster, request, tried)
        assert chosen.layout == ("new" if is_tried else "f")
        assert (chosen.prefill is None) is not is_tried, "KV goes between equal layouts alone"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_choices(policy: str) -> None:
    def pairs(seed: int) -> list[object]:
        placer, roster = Placer(policy, seed), Roster([*decoders(), *prefillers()])
        return [names(placer.choose(roster, query(first=n), NOBODY)) for n in range(50)]

    assert pairs(1) == pairs(1)
    if policy != "round_robin":
        assert pairs(1) != pairs(2)


def test_every_policy_has_a_narrowing() -> None:
    assert list(NARROWINGS) == list(POLICIES)


def test_in_turn_each_node_has_as_many() -> None:
    placer, roster = Placer("round_robin"), Roster([*decoders(61), *prefillers(35)])
    chosen = [names(placer.choose(roster, query(), NOBODY)) for _ in range(61 * 35)]
    for side, number in ((0, 61), (1, 35)):
        counts = Counter(pair[side] for pair in chosen)
        assert len(counts) == number
        assert max(counts.values()) - min(counts.values()) <= 2
    num_in_order = 61 // NUM_DRAWN * NUM_DRAWN
    in_order = [f"d{n:03}" for n in range(num_in_order)]
    assert [pair[0] for pair in chosen[:num_in_order]] == in_order


def test_draws_are_even_and_in_range() -> None:
    draws = SeededDraws(7)
    counts = Counter(draws.below(10) for _ in range(10_000))
    assert sorted(counts) == list(range(10))
    assert min(counts.values()) > 850


def test_draws_are_those_of_splitmix64() -> None:
    """A recording names the seed, and is replayed by later versions."""
    draws = SeededDraws(1234567)
    assert [draws.below(2**64) for _ in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    for seed in (0, 1, 2**64 - 1, 2**64 + 5, 0x9E3779B97F4A7C15):
        draws, state, word = SeededDraws(seed), seed, 2**64 - 1
        for end in range(1, 300):
            state = (state + 0x9E3779B97F4A7C15) & word
            mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & word
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & word
            assert draws.below(end) == (mixed ^ (mixed >> 31)) * end >> 64


@pytest.mark.parametrize("policy", POLICIES)
def test_nodes_that_cannot_be_chosen_are_not(policy: str) -> None:
    """One node in fifty can take the request; which one, the shortlist must not leave to luck."""
    able = {"d007", "d107"}
    wrong: list[dict[str, object]] = [
        {"is_draining": True},
        {"is_suspected": True},
        {"max_model_len": 20},
        {"has_grammars": False},
    ]
    views = [
        node(name, has_grammars=True) if name in able else node(name, **facts)  # type: ignore[arg-type]
        for n in range(NUM_NODES)
        for name, facts in [(f"d{n:03}", {"has_grammars": True} | wrong[n % 4])]
    ]
    request, placer = query(), Placer(policy)
    request.needs_grammars = True
    roster = Roster(views)
    assert {names(placer.choose(roster, request, NOBODY))[0] for _ in range(20)} <= able
    one_left = names(placer.choose(roster, request, frozenset({me("d007")})))
    assert one_left == ("d107", None)
    # Only where no other one is left, a suspected node decodes.
    tried = frozenset(map(me, able))
    chosen = placer.choose(roster, request, tried).decode
    assert chosen is not None
    assert roster.view(chosen).is_suspected  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", POLICIES)
def test_all_others_are_tried_before_a_request_is_refused(policy: str) -> None:
    placer, roster = Placer(policy), Roster([*decoders(90), *prefillers(50)])
    tried: set[Incarnation] = set()
    for _ in range(90):
        chosen = placer.choose(roster, query(), tried).decode
        assert chosen is not None
        assert chosen not in tried
        tried.add(chosen)
    with pytest.raises(Overloaded, match="all 90 decode and mixed nodes refused or failed"):
        placer.choose(roster, query(), tried)
    partners: set[Incarnation] = set()
    for _ in range(50):
        partner = placer.choose_prefill(roster, query(), me("d001"), partners).prefill
        assert partner is not None
        assert partner not in partners
        partners.add(partner)
    assert placer.choose_prefill(roster, query(), me("d001"), partners).prefill is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_was_refused_goes_to_any_of_the_others(policy: str) -> None:
    """Not to the first of them: many requests may be refused at the same time."""
    roster, placer = Roster([*decoders(), *prefillers()]), Placer(policy)
    chosen = Counter(
        names(placer.choose(roster, query(first=20 * n), {me("d007")})) for n in range(100)
    )
    assert "d007" not in {decode for decode, _ in chosen}
    assert len({decode for decode, _ in chosen}) > 25


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_node_that_was_not_tried_is_found(policy: str) -> None:
    roster = Roster([*decoders(), *prefillers()])
    for last in range(0, NUM_NODES, 9):
        tried = {me(f"d{n:03}") for n in range(NUM_NODES) if n != last}
        tried |= {me(f"p{n:03}") for n in range(NUM_NODES) if n != last}
        placer, pair = Placer(policy, seed=last), (f"d{last:03}", f"p{last:03}")
        assert names(placer.choose(roster, query(), tried)) == pair
        assert names(placer.choose_prefill(roster, query(), me("d001"), tried))[1] == pair[1]


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_affinity"])
def test_a_free_seat_is_found_among_full_nodes(policy: str) -> None:
    full = decoders(num_requests=10)
    full[123] = node("d123", num_requests=9)
    placer = Placer(policy)
    for _ in range(20):
        assert names(placer.choose(Roster(full), query(), NOBODY))[0] == "d123"
    # All are full: they are asked all the same, and may queue the request.
    full[123] = node("d123", num_requests=10)
    assert placer.choose(Roster(full), query(), NOBODY).decode is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_partner_has_the_layout_of_the_decode_node(policy: str) -> None:
    old, new = decoders(3, fingerprint="old"), [node(f"e{n:03}") for n in range(100)]
    partners = [prefill("q000", fingerprint="old"), *prefillers(100)]
    placer, roster = Placer(policy), Roster([*old, *new, *partners])
    for _ in range(200):
        decode, partner = names(placer.choose(roster, query(), NOBODY))
        assert decode is not None
        assert partner is not None
        assert (decode < "e") == (partner == "q000")
    assert names(placer.choose_prefill(roster, query(), me("d001"), NOBODY)) == ("d001", "q000")


def test_a_partner_beyond_the_avoided_pairs_is_found() -> None:
    """All but one prefill node fail with the only decode node."""
    placer, roster = Placer("least_loaded"), Roster([node("d000"), *prefillers()])
    avoided = frozenset((me(f"p{n:03}"), me("d000")) for n in range(NUM_NODES) if n != 77)
    assert names(placer.choose(roster, query(), NOBODY, avoided)) == ("d000", "p077")
    assert names(placer.choose_prefill(roster, query(), me("d000"), NOBODY, avoided)) == (
        "d000",
        "p077",
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_one_token_needs_no_decode_node(policy: str) -> None:
    placer, roster = Placer(policy), Looked(prefillers())
    decode, partner = names(placer.choose(roster, query(max_tokens=1), NOBODY))
    assert (decode, partner is None) == (None, False)
    assert roster.num_looked_at < NUM_NODES
    with pytest.raises(Overloaded, match="no decode or mixed node is heard"):
        placer.choose(roster, query(), NOBODY)


def test_a_request_too_long_for_every_node_is_the_callers_fault() -> None:
    roster = Roster([*decoders(max_model_len=20), *prefillers()])
    with pytest.raises(InvalidRequest, match="wanted at most max_model_len = 20"):
        Placer("least_loaded").choose(roster, query(), NOBODY)


def reports(request: Query, view: NodeView, num_blocks: int) -> BlockReport:
    return BlockReport(is_first=True, added=request.block_keys(view.record)[:num_blocks])


def test_the_deepest_holders_are_always_candidates() -> None:
    views = [*decoders(), *prefillers()]
    roster, request = Roster(views), query(800)
    for seed in range(20):
        placer = Placer("prefix_affinity", seed)
        for view in views:  # all hold a common start, which tells nothing
            placer.on_blocks(view.incarnation, reports(request, view, 20))
        deep = [views[31 * seed % NUM_NODES], views[NUM_NODES + 17 * seed % NUM_NODES]]
        for view in deep:
            placer.on_blocks(view.incarnation, reports(request, view, 200))
        wanted = tuple(view.record.node_id for view in deep)
        assert names(placer.choose(roster, request, NOBODY)) == wanted
        # Excluded, and draining: others.
        tried = frozenset(view.incarnation for view in deep)
        pair = names(placer.choose(roster, request, tried))
        assert None not in pair
        assert not set(pair) & set(wanted)
        gone = [
            dataclasses.replace(view, load=dataclasses.replace(view.load, is_draining=True))
            for view in deep
        ]
        drained = Roster([*views, *gone])
        assert not set(names(placer.choose(drained, request, NOBODY))) & set(wanted)


def test_what_has_more_of_the_prompt_is_found_without_a_look_at_all() -> None:
    views = [*decoders(sends_blocks=True), *prefillers(sends_blocks=True)]
    roster, request = Looked(views), query(800)
    placer = Placer("least_loaded")
    for view in (views[150], views[NUM_NODES + 60]):
        depth = 100 if view is views[150] else 200
        placer.on_blocks(view.incarnation, reports(request, view, depth))
    chosen = placer.choose(roster, request, frozenset({me("p060")}))
    assert chosen.source == PrefixSource(me("p060"), 800)
    assert roster.num_looked_at <= 2 * (NUM_DRAWN + NUM_HOLDERS) + MAX_HOLDERS_SEEN + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_stays_on_its_nodes(policy: str) -> None:
    roster, placer = Roster([*decoders(), *prefillers()]), Placer(policy)
    request = query()
    request.last = SessionNodes(me("d150"), me("p042"), 16)
    for _ in range(10):
        assert names(placer.choose(roster, request, NOBODY)) == ("d150", "p042")
