"""Who can be chosen, from what the store lists and what the streams say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from common.ids import Incarnation
from common.nodes import Role
from common.version import PROTOCOL_VERSION
from placement.store import LiveNode
from router.core.known.member_effects import (
    NodeGone,
    NodeHeard,
    NodeLeftOut,
    NodeSuspected,
    NodeTrusted,
    NodeUnlisted,
    StreamLost,
)
from router.core.membership import ENDED_BY_NODE, MAX_READ, Membership
from router.core.placement import Placer
from router.core.policies.query import Query
from tests.unit.router.core.listed_nodes import LEASE_S, live, with_nodes


def foreign(epoch: int) -> LiveNode:
    node = live(epoch=epoch)
    return replace(node, record=replace(node.record, model="other"))


def chosen(membership: Membership) -> list[str]:
    return [str(node.incarnation) for node in membership.nodes()]


def ask_until(
    membership: Membership, now_s: float, *, since_s: float = 0.0, nodes: Sequence[LiveNode] = ()
) -> None:
    """The store lists these nodes, once a second from a second after `since_s` until now."""
    for second in range(1, int(now_s - since_s) + 1):
        membership.on_listing(nodes, since_s + second)
    membership.on_listing(nodes, now_s)


def test_a_node_is_chosen_when_listed_and_heard() -> None:
    membership = Membership(model="m", lease_s=LEASE_S)
    membership.on_heard(Incarnation("d0", 1))
    membership.on_listing([live()], 0.0)
    assert chosen(membership) == []
    membership.on_heard(Incarnation("d0", 1))
    assert chosen(membership) == ["d0#1"]


def test_nodes_come_ordered_and_routers_are_none() -> None:
    membership = with_nodes(live("d1"), live("d0"), live("r0", role=Role.ROUTER))
    assert chosen(membership) == ["d0#1", "d1#1"]
    assert len(membership.records()) == 2


def suspected(membership: Membership) -> list[str]:
    return [str(node.incarnation) for node in membership.nodes() if node.is_suspected]


def test_a_suspected_node_is_marked_until_it_is_heard_or_lost() -> None:
    membership = with_nodes(live("d0"), live("d1"))
    membership.on_suspected(Incarnation("d0", 1), "silent", is_heard=False)
    assert (chosen(membership), suspected(membership)) == (["d0#1", "d1#1"], ["d0#1"])
    membership.on_listing([live("d0"), live("d1")], 1.0)
    assert suspected(membership) == ["d0#1"], "its lease says nothing about its stream"
    membership.on_heard(Incarnation("d0", 1))
    assert suspected(membership) == []
    membership.on_suspected(Incarnation("d0", 1), "silent", is_heard=False)
    membership.on_lost(Incarnation("d0", 1), "silent")
    assert (chosen(membership), suspected(membership)) == (["d1#1"], [])
    membership.on_suspected(Incarnation("d2", 1), "silent", is_heard=False)
    assert chosen(membership) == ["d1#1"], "a node that is not known changes nothing"


@pytest.mark.covers("F67")
def test_a_lost_node_is_out_until_it_is_heard_again() -> None:
    """No verdict is for ever."""
    membership = with_nodes(live())
    membership.on_lost(Incarnation("d0", 1), "silent")
    membership.on_listing([live()], 1.0)
    assert chosen(membership) == []
    assert len(membership.records()) == 1, "its stream is tried again"
    membership.on_heard(Incarnation("d0", 1))
    assert chosen(membership) == ["d0#1"]


@pytest.mark.covers("F63")
def test_a_newer_incarnation_replaces_the_older_one_at_once() -> None:
    membership = with_nodes(live(epoch=1))
    membership.on_listing([live(epoch=2)], 1.0)
    assert chosen(membership) == []
    assert [str(record.incarnation) for record in membership.records()] == ["d0#2"]
    membership.on_heard(Incarnation("d0", 1))
    assert chosen(membership) == []
    membership.on_heard(Incarnation("d0", 2))
    assert chosen(membership) == ["d0#2"]


def test_a_replaced_node_that_still_answers_is_kept_for_what_it_holds_only() -> None:
    membership = with_nodes(live(epoch=1))
    membership.on_leg_opened(Incarnation("d0", 1), 8)
    membership.on_listing([live(epoch=2)], 1.0)
    assert len(membership.records()) == 2
    assert chosen(membership) == []
    membership.on_leg_closed(Incarnation("d0", 1), 8)
    membership.on_listing([live(epoch=2)], 2.0)
    assert len(membership.records()) == 1


def unlisted(membership: Membership) -> list[str]:
    return [str(node) for node in membership.unlisted()]


def test_a_node_that_is_heard_stays_however_long_the_store_lists_nobody() -> None:
    """A store that refuses writes answers on, and every lease in it ends."""
    membership = with_nodes(live())
    ask_until(membership, 5.0)
    assert unlisted(membership) == []
    ask_until(membership, 5000.0, since_s=5.0)
    assert chosen(membership) == ["d0#1"]
    assert unlisted(membership) == ["d0#1"]
    assert membership.num_listed == 0
    membership.on_listing([live()], 5001.0)
    assert [unlisted(membership), membership.num_listed] == [[], 1]


@pytest.mark.covers("F72")
def test_a_node_that_ends_its_stream_and_is_not_listed_is_tried_for_one_lease() -> None:
    """An emptied store fills again within a lease."""
    membership = with_nodes(live())
    ask_until(membership, 100.0)
    membership.on_lost(Incarnation("d0", 1), "silent")
    ask_until(membership, 105.0, since_s=100.0)
    assert chosen(membership) == []
    assert len(membership.records()) == 1
    membership.on_listing([], 105.1)
    assert membership.records() == []


def test_a_store_without_the_leases_of_nodes_that_are_heard_says_nothing_of_others() -> None:
    """A stream that breaks is opened again, although the store has no lease of its node either."""
    membership = with_nodes(live("d0"), live("d1"))
    ask_until(membership, 50.0)
    membership.on_lost(Incarnation("d1", 1), "silent")
    ask_until(membership, 600.0, since_s=50.0)
    assert chosen(membership) == ["d0#1"]
    assert [record.node_id for record in membership.records()] == ["d0", "d1"]
    membership.on_heard(Incarnation("d1", 1))
    assert chosen(membership) == ["d0#1", "d1#1"]
    membership.on_lost(Incarnation("d1", 1), "silent")
    ask_until(membership, 606.0, since_s=600.0, nodes=[live("d0")])
    assert [record.node_id for record in membership.records()] == ["d0"], "the store is complete"


def test_an_old_load_does_not_count() -> None:
    node = Incarnation("d0", 1)
    membership = with_nodes(live(num_running=10))
    membership.on_leg_opened(node, 8)
    assert num_requests(membership) == 12
    ask_until(membership, 6.0)
    assert num_requests(membership) == 1
    assert not membership.nodes()[0].is_listed
    membership.on_listing([live(num_running=10)], 7.0)
    assert num_requests(membership) == 11


def test_a_newer_incarnation_that_cannot_be_used_replaces_the_older_one_too() -> None:
    membership = with_nodes(live(epoch=2), live("d1"))
    membership.on_listing([live("d1"), foreign(1)], 1.0)
    assert chosen(membership) == ["d0#2", "d1#1"]
    membership.on_listing([live("d1"), foreign(3)], 1.0)
    assert chosen(membership) == ["d1#1"]


def test_a_router_that_stood_still_for_a_lease_takes_nobody_for_gone() -> None:
    membership = with_nodes(live(), now_s=0.0)
    assert chosen(membership) == ["d0#1"], "however late it is"
    membership.on_listing([live()], 1000.0)
    assert chosen(membership) == ["d0#1"]


def test_a_lost_node_that_stood_still_with_the_router_has_time_to_come_back() -> None:
    """A machine that was paused: every lease is over before the first node can renew its own."""
    membership = with_nodes(live())
    membership.on_lost(Incarnation("d0", 1), "silent")
    membership.on_listing([], 1000.0)
    assert len(membership.records()) == 1
    membership.on_listing([live()], 1001.0)
    membership.on_listing([], 2000.0)
    ask_until(membership, 2002.0, since_s=2000.0)
    assert len(membership.records()) == 1
    membership.on_listing([], 2003.0)
    assert membership.records() == [], "it did not come back"


def test_a_store_that_is_away_removes_no_node_that_is_heard() -> None:
    membership = with_nodes(live())
    for second in range(10_000):
        membership.on_store_away(1.0 + second)
    assert chosen(membership) == ["d0#1"]
    assert unlisted(membership) == [], "nobody knows what it holds"


def test_a_lost_node_is_tried_for_a_bounded_time_while_the_store_is_away() -> None:
    membership = with_nodes(live())
    membership.on_lost(Incarnation("d0", 1), "silent")
    for second in range(600):
        membership.on_store_away(1.0 + second)
        assert len(membership.records()) == 1
    membership.on_store_away(601.0)
    assert membership.records() == []


def test_a_store_that_comes_back_empty_takes_away_those_that_were_lost() -> None:
    membership = with_nodes(live("d0"), live("d1"))
    membership.on_lost(Incarnation("d1", 1), "silent")
    assert not membership.is_store_away
    membership.on_store_away(3.0)
    assert [membership.is_store_away, chosen(membership)] == [True, ["d0#1"]]
    membership.on_listing([], 6.0)
    assert [membership.is_store_away, chosen(membership)] == [False, ["d0#1"]]
    membership.on_listing([live("d0")], 7.0)
    assert [r.node_id for r in membership.records()] == ["d0"]


def test_a_replaced_node_does_not_return_with_the_store() -> None:
    membership = with_nodes(live(epoch=1))
    membership.on_leg_opened(Incarnation("d0", 1), 8)
    membership.on_listing([live(epoch=2)], 1.0)
    membership.on_store_away(2.0)
    membership.on_listing([], 3.0)
    assert chosen(membership) == []


def num_requests(membership: Membership) -> int:
    (node,) = membership.nodes()
    return node.num_requests


@pytest.mark.covers("F76", "F92")
def test_requests_sent_since_the_last_report_count() -> None:
    """A burst between two reports does not land on one node."""
    node = Incarnation("d0", 1)
    membership = with_nodes(live(num_running=10))
    assert num_requests(membership) == 11
    for _ in range(3):
        membership.on_leg_opened(node, 8)
    assert num_requests(membership) == 14
    membership.on_leg_closed(node, 8)
    assert num_requests(membership) == 13
    membership.on_listing([live(num_running=12)], 0.0)
    assert num_requests(membership) == 12, "the one that ended may be among the 13"
    for _ in range(2):
        membership.on_listing([live(num_running=12)], 0.0)
    assert num_requests(membership) == 13
    membership.on_leg_closed(node, 8)
    assert num_requests(membership) == 12


def test_a_node_has_requests_from_the_first_until_the_last_one_ends() -> None:
    node = Incarnation("d0", 1)
    membership = with_nodes(live())
    assert not membership.used
    membership.on_leg_opened(Incarnation("d0", 2), 8)
    for _ in range(2):
        membership.on_leg_opened(node, 8)
    membership.on_leg_closed(node, 8)
    assert membership.used == {node}
    membership.on_leg_closed(node, 8)
    assert not membership.used


def test_a_node_that_is_forgotten_has_no_requests() -> None:
    node = Incarnation("d0", 1)
    membership = with_nodes(live())
    membership.on_leg_opened(node, 8)
    membership.on_lost(node, "silent")
    for now_s in range(1, 40):
        membership.on_listing([], float(now_s))
    assert not membership.records()
    assert not membership.used


def test_what_ended_since_the_last_report_does_not_count() -> None:
    """Or else the next burst would go round a node that has just become idle."""
    node = Incarnation("d0", 1)
    membership = with_nodes(live())
    for _ in range(4):
        membership.on_leg_opened(node, 8)
    membership.on_listing([live(num_running=5)], 0.0)  # and one that waits: two of another router
    assert num_requests(membership) == 6
    for _ in range(4):
        membership.on_leg_closed(node, 8)
    assert num_requests(membership) == 2


@pytest.mark.covers("F76")
def test_a_frozen_report_is_corrected_by_what_this_router_runs() -> None:
    node = Incarnation("d0", 1)
    membership = with_nodes(live())
    for _ in range(5):
        membership.on_leg_opened(node, 8)
        membership.on_listing([live()], 0.0)
    assert num_requests(membership) == 5


@pytest.mark.covers("F96")
def test_a_node_that_joins_gets_no_more_of_a_burst_than_levels_it_with_the_others() -> None:
    """Its report says that it is empty until the next one, so what was sent since must count."""
    members = with_nodes(live("d0", num_running=20), live("d1", num_running=20), live("d2"))
    placer = Placer("least_loaded")
    for _ in range(60):
        choice = placer.choose(members.nodes(), Query((1, 2), 8), frozenset())
        assert choice.decode is not None
        members.on_leg_opened(choice.decode, 0)
    # One request waited on each before: 21, 21 and 1.
    assert [node.num_requests for node in members.nodes()] == [35, 34, 34]


def test_a_long_prompt_counts_on_a_mixed_node_until_it_is_computed() -> None:
    members = with_nodes(live("m0", role=Role.MIXED), live("m1", role=Role.MIXED))
    placer = Placer("least_loaded")

    def chosen_node() -> Incarnation | None:
        return placer.choose(members.nodes(), Query((1, 2), 8), frozenset()).decode

    m0, m1 = Incarnation("m0", 1), Incarnation("m1", 1)
    members.on_leg_opened(m0, 12_000)
    members.on_leg_opened(m1, 8)
    members.on_leg_opened(m1, 8)
    assert [node.num_queued_tokens for node in members.nodes()] == [12_000, 16]
    assert chosen_node() == m1
    members.on_prompt_computed(m0, 12_000)
    assert [node.num_queued_tokens for node in members.nodes()] == [0, 16]
    assert [node.num_requests for node in members.nodes()] == [2, 3], "one waited on each before"
    assert chosen_node() == m0


def long(node: LiveNode, max_model_len: int, *, is_draining: bool = False) -> LiveNode:
    return LiveNode(
        record=replace(node.record, max_model_len=max_model_len),
        load=replace(node.load, is_draining=is_draining),
    )


def test_the_longest_model_is_that_of_a_node_that_can_be_chosen_and_finishes_answers() -> None:
    assert Membership(model="m", lease_s=LEASE_S).max_model_len() is None
    older = long(live("d0"), 700)
    membership = with_nodes(
        older,
        long(live("d1"), 200),
        long(live("m0", role=Role.MIXED), 300),
        long(live("d2"), 900, is_draining=True),
        long(live("p0", role=Role.PREFILL), 800),
    )
    assert membership.max_model_len() == 700
    membership.on_leg_opened(older.record.incarnation, 8)
    membership.on_listing([long(live("d0", epoch=2), 700)], 1.0)
    assert membership.max_model_len() == 300, "one is replaced, its successor is not heard"
    membership.on_lost(Incarnation("m0", 1), "silent")
    assert membership.max_model_len() == 200


def test_unknown_nodes_are_ignored() -> None:
    membership = Membership(model="m", lease_s=LEASE_S)
    node = Incarnation("ghost", 1)
    membership.on_lost(node, "silent")
    membership.on_leg_opened(node, 8)
    membership.on_prompt_computed(node, 8)
    membership.on_leg_closed(node, 8)
    assert membership.records() == []


def test_a_node_that_joins_is_told_of_when_it_is_heard() -> None:
    membership = Membership(model="m", lease_s=LEASE_S)
    node = live().record.incarnation
    assert membership.on_listing([live()], 0.0) == []
    assert not membership.was_heard(node)
    assert membership.on_heard(node) == [NodeHeard(node, False), NodeTrusted(node, False)]
    assert membership.was_heard(node)
    assert membership.on_heard(node) == []


def test_a_suspicion_is_told_of_once_and_again_for_another_reason() -> None:
    membership = with_nodes(live())
    node = live().record.incarnation
    silent = membership.on_suspected(node, "silent", is_heard=False)
    assert silent == [NodeSuspected(node, "silent", False, True)]
    assert membership.on_suspected(node, "silent", is_heard=False) == []
    unreached = membership.on_heard(node, unreached="unreached")
    assert unreached == [NodeSuspected(node, "unreached", True, False)]
    (stuck,) = membership.on_heard(node, stuck_s=7.5)
    assert stuck == NodeSuspected(node, "its step has lasted 7.5 s", False, False)
    assert membership.nodes()[0].is_suspected
    assert membership.on_heard(node) == [NodeTrusted(node, True)]
    assert not membership.nodes()[0].is_suspected


def test_a_lost_node_that_is_heard_again_was_lost_and_its_suspicion_is_forgotten() -> None:
    membership = with_nodes(live())
    node = live().record.incarnation
    membership.on_suspected(node, "silent", is_heard=False)
    assert membership.on_lost(node, "broken") == [StreamLost(node, is_orderly=False)]
    assert membership.was_heard(node)
    assert membership.on_heard(node) == [NodeHeard(node, True), NodeTrusted(node, False)]
    assert membership.on_lost(node, ENDED_BY_NODE) == [StreamLost(node, is_orderly=True)]


@pytest.mark.parametrize(
    ("reason", "is_listed", "is_away", "has_left"),
    [
        (ENDED_BY_NODE, False, False, True),
        (ENDED_BY_NODE, True, False, False),
        (ENDED_BY_NODE, False, True, False),
        ("broken", False, False, False),
    ],
)
def test_a_node_has_left_if_it_ended_the_stream_and_is_not_listed(
    reason: str, is_listed: bool, is_away: bool, has_left: bool
) -> None:
    membership = with_nodes(live())
    node = live().record.incarnation
    membership.on_lost(node, reason)
    assert membership.on_listing([], 1.0) == [], "it was lost after the store was asked"
    membership.on_asking()
    listed = [live()] if is_listed else []
    ended = membership.on_store_away(2.0) if is_away else membership.on_listing(listed, 2.0)
    assert ended == [NodeGone(node, reason, has_left)]
    membership.on_asking()
    assert membership.on_listing(listed, 3.0) == [], "told of once"


@pytest.mark.covers("M08")
@pytest.mark.parametrize(
    ("ours", "theirs", "is_used"),
    [("t", "t", True), ("t", "", True), ("", "t", True), ("t", "u", False)],
)
def test_a_node_whose_tokens_mean_others_gets_no_request(
    ours: str, theirs: str, is_used: bool
) -> None:
    membership = Membership(model="m", lease_s=LEASE_S, tokens=ours)
    node = replace(live(), record=replace(live().record, tokens=theirs))
    effects = membership.on_listing([node], 0.0)
    membership.on_heard(node.record.incarnation)
    assert membership.records() == ([node.record] if is_used else [])
    reason = "its tokenizer is another one than this router's (tokenizer.json)"
    assert (NodeLeftOut(Incarnation("d0", 1), reason) in effects) is not is_used
    assert membership.num_other_tokenizers == (not is_used)
    assert membership.num_other_versions == 0


def test_nodes_that_cannot_be_members_are_told_of_once() -> None:
    membership = Membership(model="m", lease_s=LEASE_S)
    old = replace(live("d1"), record=replace(live("d1").record, protocol=1))
    left_out = membership.on_listing([foreign(1), old], 0.0)
    assert left_out == [
        NodeLeftOut(Incarnation("d0", 1), "it serves other, not m"),
        NodeLeftOut(
            Incarnation("d1", 1),
            f"its protocol version is 1, this router's {PROTOCOL_VERSION}",
        ),
    ]
    assert membership.on_listing([foreign(1), old], 1.0) == []
    assert (membership.other_models, membership.records()) == (["other"], [])
    assert membership.on_listing([], 2.0) == []
    assert len(membership.on_listing([foreign(1)], 3.0)) == 1


def test_a_node_that_is_heard_and_unlisted_is_told_of_once() -> None:
    membership = with_nodes(live())
    node = live().record.incarnation
    ask_until(membership, LEASE_S, nodes=[])
    assert membership.on_listing([], LEASE_S + 1) == [NodeUnlisted(node)]
    assert membership.on_listing([], LEASE_S + 2) == []
    membership.on_store_away(LEASE_S + 3)
    assert membership.on_listing([], LEASE_S + 4) == [NodeUnlisted(node)]


def with_steps(
    nodes: Sequence[LiveNode], steps: Iterable[Callable[[Membership], object]]
) -> Membership:
    membership = with_nodes(*nodes)
    for step in steps:
        step(membership)
    return membership


def test_views_are_as_fresh_as_if_they_were_made_for_each_request() -> None:
    first = [live("d0"), live("d1"), live("p0", role=Role.PREFILL)]
    d0, d1, p0 = (node.record.incarnation for node in first)
    steps: list[Callable[[Membership], object]] = [
        lambda membership: membership.on_leg_opened(p0, 64),
        lambda membership: membership.on_leg_opened(d0, 64),
        lambda membership: membership.on_prompt_computed(d0, 64),
        lambda membership: membership.on_leg_closed(p0, 64),
        lambda membership: membership.on_listing(first, 0.5),
        lambda membership: membership.on_leg_closed(d0, 0),
        *[lambda membership: membership.on_listing(first, 1.0)] * 3,
        lambda membership: membership.on_suspected(d1, "silent", is_heard=False),
        lambda membership: membership.on_heard(d1),
        lambda membership: membership.on_lost(d0, "broken"),
        lambda membership: membership.on_heard(d0),
        lambda membership: membership.on_listing([live("d1", num_running=3)], 2.0),
        lambda membership: membership.on_store_away(9.0),
        lambda membership: membership.on_store_away(18.0),
        lambda membership: membership.on_listing(first, 18.0),
        lambda membership: membership.on_listing([live("d1", epoch=2)], 19.0),
    ]
    asked = with_nodes(*first)
    for number, step in enumerate(steps, 1):
        step(asked)
        never_asked = with_steps(first, steps[:number])
        assert asked.max_model_len() == with_steps(first, steps[:number]).max_model_len()
        assert list(asked.nodes()) == list(never_asked.nodes())
        assert asked.max_model_len() == never_asked.max_model_len()


def test_of_a_listing_only_what_is_new_is_read() -> None:
    nodes = [live(f"d{n}") for n in range(3)]
    membership = with_nodes(*nodes)
    membership.nodes()
    membership.on_listing([live(f"d{n}") for n in range(3)], 1.0)
    assert not membership.has_unread
    membership.on_listing([*nodes[:2], live("d2", num_running=2)], 2.0)
    assert [node.num_requests for node in membership.nodes()] == [1, 1, 3]


def test_a_long_listing_is_read_in_parts() -> None:
    """What has left, or is new, is seen at once; loads follow, a part with each request."""
    num_nodes = 2 * MAX_READ + 40
    membership = with_nodes(*(live(f"d{n:04}") for n in range(num_nodes)))
    for _ in range(3):
        membership.nodes()
    loaded = [live(f"d{n:04}", num_running=3) for n in range(num_nodes - 1)]
    membership.on_lost(Incarnation(f"d{num_nodes - 1:04}", 1), "broken")
    membership.on_listing([*loaded, live("d0000", epoch=2)], 1.0)
    nums_read, are_left = [], []
    for _ in range(3):
        nodes = membership.nodes()
        assert "d0000#1" not in chosen(membership)
        assert len(nodes) == num_nodes - 2
        nums_read.append(sum(node.num_requests > 3 for node in nodes))
        are_left.append(membership.has_unread)
    assert nums_read[0] < num_nodes - 2 == nums_read[-1]
    assert are_left == [True, False, False]
