"""Which nodes served each session last: for how long, for how many, and when they are left."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import Incarnation
from common.nodes import Role
from router.core.known.node_view import NodeView
from router.core.known.sessions import NO_NODES, KnownSessions, Placed, SessionNodes
from router.core.placement import Placer
from router.core.policies import POLICIES
from router.core.policies.query import Query
from tests.support.nodes.node_views import names, node, prefill, query

NOBODY: frozenset[Incarnation] = frozenset()
D0, D1, P0, P1 = (Incarnation(name, 1) for name in ("d0", "d1", "p0", "p1"))


def nodes(decode: Incarnation | None, prefill: Incarnation | None = None) -> SessionNodes:
    return SessionNodes(decode, prefill, 16)


# The map.


def test_a_session_is_known_for_its_time_from_its_last_request_on() -> None:
    sessions = KnownSessions(ttl_s=10.0)
    assert sessions.last(b"a", 0.0) is NO_NODES
    assert sessions.on_placed(b"a", nodes(D0, P0), 0.0) is Placed.NEW
    assert sessions.last(b"a", 9.9) == nodes(D0, P0)
    assert sessions.on_placed(b"a", nodes(D0, P0), 9.9) is Placed.KEPT
    assert sessions.last(b"a", 19.8) == nodes(D0, P0)
    assert sessions.last(b"a", 19.9) is NO_NODES
    assert len(sessions) == 0


def test_a_role_without_a_node_keeps_its_last_one() -> None:
    sessions = KnownSessions(ttl_s=10.0)
    sessions.on_placed(b"a", nodes(D0, P0), 0.0)
    assert sessions.on_placed(b"a", nodes(D0), 1.0) is Placed.KEPT
    assert sessions.last(b"a", 1.0) == nodes(D0, P0)
    assert sessions.on_placed(b"a", nodes(None, P0), 2.0) is Placed.KEPT
    assert sessions.last(b"a", 2.0) == nodes(D0, P0)
    assert sessions.on_placed(b"a", nodes(D1, P0), 3.0) is Placed.MOVED
    assert sessions.on_placed(b"a", nodes(D1, P1), 3.0) is Placed.MOVED


def test_the_first_node_of_a_role_is_no_move() -> None:
    sessions = KnownSessions(ttl_s=10.0)
    sessions.on_placed(b"a", nodes(None, P0), 0.0)
    assert sessions.on_placed(b"a", nodes(D0, P0), 0.0) is Placed.KEPT


def test_without_time_to_live_nothing_is_remembered() -> None:
    sessions = KnownSessions(ttl_s=0.0)
    sessions.on_placed(b"a", nodes(D0), 0.0)
    assert sessions.last(b"a", 0.0) is NO_NODES


@pytest.mark.covers("F78", "F145")
def test_the_session_that_was_placed_longest_ago_is_forgotten_first() -> None:
    sessions = KnownSessions(ttl_s=10.0, max_sessions=2)
    for session in (b"a", b"b", b"a", b"c"):
        sessions.on_placed(session, nodes(D0), 0.0)
    assert sessions.last(b"a", 0.0) == nodes(D0)
    assert sessions.last(b"b", 0.0) is NO_NODES


def test_a_session_that_goes_on_does_not_keep_others_beyond_their_time() -> None:
    sessions = KnownSessions(ttl_s=10.0)
    for session, now_s in ((b"a", 0.0), (b"b", 1.0), (b"a", 9.0)):
        sessions.on_placed(session, nodes(D0), now_s)
    assert sessions.last(b"b", 11.0) is NO_NODES
    assert sessions.last(b"a", 11.0) == nodes(D0)
    assert len(sessions) == 1


EVENTS = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(0, 4), st.integers(0, 3)),
    max_size=40,
)


@pytest.mark.covers("F78")
@given(events=EVENTS, ttl_s=st.integers(0, 6), most=st.integers(1, 3))
def test_the_map_is_that_of_a_plain_list_of_all_placements(
    events: list[tuple[bytes, int, int]], ttl_s: int, most: int
) -> None:
    sessions, now_s = KnownSessions(ttl_s, most), 0
    model: OrderedDict[bytes, tuple[Incarnation, int]] = OrderedDict()
    for session, wait_s, number in events:
        now_s += wait_s
        model = OrderedDict((k, v) for k, v in model.items() if v[1] + ttl_s > now_s)
        known = model[session][0] if session in model else None
        assert sessions.last(session, now_s).decode == known
        placed = sessions.on_placed(session, nodes(Incarnation("d", number)), now_s)
        expected = Placed.KEPT if known == Incarnation("d", number) else Placed.MOVED
        assert placed is (Placed.NEW if known is None else expected)
        model.pop(session, None)
        model[session] = Incarnation("d", number), now_s
        while len(model) > most:
            model.popitem(last=False)
        assert len(sessions) == len(model) <= most


# Placement.


def turn(last: SessionNodes, num_tokens: int = 16, max_tokens: int = 8) -> Query:
    asked = query(num_tokens, max_tokens)
    asked.session, asked.last = b"a", last
    return asked


CLUSTER = [node("d0"), node("d1"), prefill("p0"), prefill("p1")]


@pytest.mark.covers("F134")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("last", [nodes(D0, P0), nodes(D1, P1), nodes(D0, P1), nodes(D1, P0)])
def test_every_policy_keeps_a_session_on_its_nodes(policy: str, last: SessionNodes) -> None:
    placer = Placer(policy)
    for _ in range(3):  # round_robin moves its turn on
        chosen = placer.choose(CLUSTER, turn(last), NOBODY)
        assert (chosen.decode, chosen.prefill) == (last.decode, last.prefill)
        assert "its session's node" in chosen.reason


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_for_one_token_goes_to_the_prefill_node_of_its_session(policy: str) -> None:
    chosen = Placer(policy).choose(CLUSTER, turn(nodes(D0, P1), max_tokens=1), NOBODY)
    assert (chosen.decode, chosen.prefill) == (None, P1)


def test_another_prefill_node_for_a_reservation_is_the_sessions() -> None:
    cluster = [*CLUSTER, prefill("p2")]
    asked = turn(nodes(D0, Incarnation("p2", 1)))
    assert names(Placer("least_loaded").choose_prefill(cluster, asked, D0, {P0})) == ("d0", "p2")


@pytest.mark.covers("F141")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("d1", "what"),
    [
        (node("d1", is_draining=True), "it drains"),
        (node("d1", is_suspected=True), "it is suspected"),
        (node("d1", max_model_len=23), "the request does not fit it"),
        (node("d1", num_requests=6), "it is much busier than another one"),
        (node("d1", free_blocks=40), "its blocks are taken"),
        (node("d1", fingerprint="f", num_requests=10), "it is full"),
    ],
)
def test_a_session_leaves_a_decode_node(policy: str, d1: NodeView, what: str) -> None:
    chosen = Placer(policy).choose([node("d0"), d1], turn(nodes(D1)), NOBODY)
    assert chosen.decode == D0, what
    assert policy in chosen.reason


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_stays_where_the_others_are_no_better(policy: str) -> None:
    busy = [node("d0", num_requests=5), node("d1", num_requests=10)]
    assert Placer(policy).choose(busy, turn(nodes(D1)), NOBODY).decode == D0
    full = [node("d0", num_requests=10), node("d1", num_requests=10)]
    assert Placer(policy).choose(full, turn(nodes(D1)), NOBODY).decode == D1
    nearly = [node("d0"), node("d1", num_requests=5)]
    assert Placer(policy).choose(nearly, turn(nodes(D1)), NOBODY).decode == D1


def test_a_session_leaves_a_node_that_was_tried_and_one_in_another_life() -> None:
    placer = Placer("least_loaded")
    assert placer.choose(CLUSTER, turn(nodes(D1, P1)), frozenset({D1, P1})).decode == D0
    again = Incarnation("d1", 2)
    assert placer.choose(CLUSTER, turn(nodes(again)), NOBODY).decode == D0


def test_a_pair_that_fails_is_left_by_its_sessions() -> None:
    placer, avoided = Placer("least_loaded"), frozenset({(P1, D1)})
    chosen = placer.choose(CLUSTER, turn(nodes(D1, P1)), NOBODY, avoided)
    assert (chosen.decode, chosen.prefill) == (D0, P1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED])
def test_a_longer_conversation_waits_longer_for_its_node(policy: str, role: Role) -> None:
    """Waiting behind tokens costs less than computing as many again."""

    def chosen(num_before: int, num_now: int) -> str | None:
        busy = node("b", role, queued_tokens=5900, max_model_len=10**6)
        idle = node("a", role, max_model_len=10**6)
        others = [node("d0", max_model_len=10**6)] if role is Role.PREFILL else []
        b = Incarnation("b", 1)
        decode, computes = (None, b) if role is Role.PREFILL else (b, None)
        asked = turn(SessionNodes(decode, computes, num_before), num_tokens=num_now)
        pair = names(Placer(policy).choose([busy, idle, *others], asked, NOBODY))
        return pair[1] if role is Role.PREFILL else pair[0]

    assert chosen(1900, 2000) == "b"
    assert chosen(1900, 1000) == "a"
    assert chosen(1000, 2000) == "a"


def test_what_is_saved_on_a_decode_node_is_little_and_its_seats_count() -> None:
    last = SessionNodes(D1, None, 10**6)
    d0, d1 = (node(f"d{n}", num_requests=6 * n, max_model_len=10**7) for n in range(2))
    assert Placer("least_loaded").choose([d0, d1], turn(last, 10**6), NOBODY).decode == D0
