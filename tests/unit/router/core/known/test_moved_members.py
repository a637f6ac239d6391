"""Members whose role moves: what counts, and what is told to requests."""

from __future__ import annotations

import pytest

from common.ids import Incarnation
from common.nodes import Role
from router.core.known.member_effects import MembershipEffect, NodeDecodes
from tests.unit.router.core.listed_nodes import live, with_nodes


def test_a_role_that_a_node_tells_counts_at_once_and_more_than_a_listing_asked_for_before() -> None:
    node = live()
    membership = with_nodes(node)

    def role() -> Role:
        return membership.nodes()[0].record.role

    membership.on_asking()
    membership.on_role(node.record.incarnation, Role.PREFILL)
    assert role() is Role.PREFILL
    membership.on_listing([node], 1.0)
    assert role() is Role.PREFILL
    membership.on_asking()
    membership.on_listing([node], 2.0)
    assert role() is Role.DECODE, "what the store lists later"


def test_a_role_of_a_node_that_is_unknown_changes_nothing() -> None:
    membership = with_nodes(live())
    assert membership.on_role(Incarnation("d9", 1), Role.MIXED) == []
    assert [one.record.role for one in membership.nodes()] == [Role.DECODE]


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_node_that_decodes_from_now_on_is_told_of_once(role: Role, is_told: bool) -> None:
    first = live(role=Role.PREFILL)
    moved, node = live(role=role), first.record.incarnation
    membership = with_nodes(first)

    def move() -> list[MembershipEffect]:
        membership.on_asking()
        if is_told:
            return membership.on_role(node, role)
        return membership.on_listing([moved], 1.0)

    assert move() == [NodeDecodes(node)]
    assert [one.record.role for one in membership.nodes()] == [role], "when it is told"
    assert move() == []
    membership.on_asking()
    assert membership.on_listing([moved], 2.0) == []


def test_a_node_that_does_not_decode_or_cannot_be_chosen_is_not_told_of() -> None:
    decode, prefill = live("d0"), live("p0", role=Role.PREFILL)
    membership = with_nodes(decode, prefill)
    assert membership.on_role(decode.record.incarnation, Role.MIXED) == [], "it did before"
    assert membership.on_role(decode.record.incarnation, Role.PREFILL) == []
    membership.on_lost(prefill.record.incarnation, "broken")
    assert membership.on_role(prefill.record.incarnation, Role.MIXED) == []


def test_a_moved_node_is_of_the_kind_of_its_new_role() -> None:
    first, second = live("d0"), live("d1")
    membership = with_nodes(first, second)
    membership.nodes()
    membership.on_role(first.record.incarnation, Role.PREFILL)
    kinds = {kind.record.role: kind for kind in membership.nodes().kinds()}
    assert kinds.keys() == {Role.PREFILL, Role.DECODE}
    assert kinds[Role.PREFILL].ready == [first.record.incarnation]
    assert kinds[Role.DECODE].ready == [second.record.incarnation]
    assert all(kind.record.role is role for role, kind in kinds.items())
