"""What a router knows of its nodes is compared with what it was told, and what it tells with what
must be told."""

from __future__ import annotations

from collections.abc import Set

import pytest

from common.errors import InternalError
from common.ids import AttemptId, Incarnation
from common.kv.blocks import HASH_BYTES, block_keys
from common.kv.tiers import Tier
from common.nodes import Role
from common.request import FinishReason, RequestCounts
from placement.store import LiveNode
from router.core.effects import Accepted, Finish, PlaceRecord, Unplace
from router.core.known.block_index import BlockIndex
from router.core.known.roster import Roster
from router.core.membership import Membership
from simulator.faults.books.known import (
    check_blocks,
    check_roles,
    check_suspected,
    check_views,
)
from simulator.faults.books.told import Placements, check_counts
from tests.support.nodes.node_views import node, prefill

D, P = Incarnation("d", 1), Incarnation("p", 1)
FIRST, NEXT = AttemptId("r", 1), AttemptId("r", 2)
NAMES = [bytes([number]) * HASH_BYTES for number in range(3)]


def heard(kind: type[Membership] = Membership) -> Membership:
    found = kind(model="m", lease_s=10.0)
    views = (node("d"), prefill("p"))
    found.on_listing([LiveNode(record=one.record, load=one.load) for one in views], 0.0)
    for one in (D, P):
        found.on_heard(one)
    return found


def test_an_old_view_of_a_node_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    members = heard()
    check_views(members)
    members.on_leg_opened(D, 4)
    check_views(members)
    for old in (Roster(list(members.nodes())[:1]), Roster([node("d"), prefill("p")])):
        monkeypatch.setattr(members, "nodes", lambda old=old: old)
        with pytest.raises(InternalError, match="is known as"):
            check_views(members)


def test_a_node_in_the_wrong_list_of_its_kind_is_noticed() -> None:
    members = heard()
    for kind in members.nodes().kinds():
        kind.free.clear()
    with pytest.raises(InternalError, match="count as free"):
        check_views(members)


def test_a_node_without_requests_that_counts_as_used_is_noticed() -> None:
    class Forgetful(Membership):
        @property
        def used(self) -> Set[Incarnation]:
            return {D}

    members = heard(Forgetful)
    members.on_leg_opened(D, 0)
    check_views(members)
    members.on_leg_closed(D, 0)
    with pytest.raises(InternalError, match="count as used"):
        check_views(members)


def test_a_role_that_was_told_and_is_not_known_is_noticed() -> None:
    check_roles([prefill("d")], {D: Role.PREFILL})
    check_roles([node("d")], {})
    with pytest.raises(InternalError, match="d#1 counts as"):
        check_roles([node("d")], {D: Role.PREFILL})


def test_blocks_that_are_known_are_those_that_were_told_of() -> None:
    index, told = BlockIndex(), {Tier.POOL: NAMES[:2], Tier.HOST: NAMES[2:]}
    index.on_report(D, block_keys(NAMES[:2]), ())
    index.on_report(D, block_keys(NAMES[2:]), (), Tier.HOST)
    check_blocks(index, D, told)
    check_blocks(index, P, {Tier.POOL: []})
    with pytest.raises(InternalError, match="1 blocks of d#1 in"):
        check_blocks(index, D, {**told, Tier.HOST: []})
    with pytest.raises(InternalError, match="d#1 is looked up for other blocks than it told of"):
        check_blocks(index, D, {Tier.POOL: NAMES[:2]})
    with pytest.raises(InternalError, match="3 blocks of p#1 in"):
        check_blocks(index, P, {Tier.POOL: NAMES})
    index.on_report(D, (), block_keys(NAMES[2:]), Tier.HOST)
    with pytest.raises(InternalError, match="1 blocks of d#1 in"):
        check_blocks(index, D, told)


def test_a_request_is_accepted_once_and_leaves_no_placement() -> None:
    books, end = Placements(), Finish(FinishReason.STOP)
    books.take("r", [Accepted(), PlaceRecord(FIRST, D, P, "")], has_tokens=False)
    for has_tokens, name in ((False, "r"), (True, "s")):
        with pytest.raises(InternalError, match="is accepted twice, or after its first token"):
            books.take(name, [Accepted()], has_tokens=has_tokens)
    books.take("r", [Unplace(FIRST), PlaceRecord(NEXT, D, None, "")], has_tokens=True)
    with pytest.raises(InternalError, match="r has ended, and its placement is in the store"):
        books.take("r", [end], has_tokens=True)
    books.take("r", [Unplace(NEXT), end], has_tokens=True)


def test_what_is_counted_follows_from_the_tokens() -> None:
    check_counts("r", None, RequestCounts(0, 3, 2), 4, 3)
    check_counts("r", RequestCounts(3, 3, 2), RequestCounts(3, 4, 2), 4, 3)
    for before, counts in (
        (None, RequestCounts(4, 0, 0)),
        (None, RequestCounts(0, 1, 2)),
        (None, RequestCounts(0, 9, 4)),
        (RequestCounts(0, 5, 0), RequestCounts(0, 4, 0)),
    ):
        with pytest.raises(InternalError, match="r has"):
            check_counts("r", before, counts, 4, 3)


def test_a_node_that_is_heard_is_suspected_exactly_if_nothing_is_done_on_it() -> None:
    members = heard()
    check_suspected(members, D, "")
    with pytest.raises(InternalError, match="d#1 counts as working, and nothing arrives there"):
        check_suspected(members, D, "nothing arrives there")
    members.on_heard(D, unreached="nothing arrives there")
    check_suspected(members, D, "nothing arrives there")
    with pytest.raises(InternalError, match="d#1 counts as suspected, and works"):
        check_suspected(members, D, "")
    check_suspected(members, Incarnation("e", 1), "nobody knows it")
