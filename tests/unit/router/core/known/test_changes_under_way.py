"""What nodes are to become counts before they say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import NodeLost
from common.ids import Incarnation
from common.nodes import Role
from router.core.known.changes import ChangesUnderWay
from router.core.known.node_view import NodeView
from tests.support.nodes.fluid_cluster import FluidCluster


def views() -> list[NodeView]:
    """Return two prefill and two decode nodes."""
    return [node.view() for node in FluidCluster(2, 2).nodes]


P0, P1, D0, D1 = (one.incarnation for one in views())


def leaves_decode(changes: ChangesUnderWay, changed: Incarnation) -> bool:
    return changes.leaves_one(views(), changed, Role.PREFILL)


def test_a_node_with_another_role_to_come_is_not_counted_on() -> None:
    changes = ChangesUnderWay()
    assert leaves_decode(changes, D0)
    with changes.of_role(D1, Role.PREFILL):
        assert not leaves_decode(changes, D0)
        assert leaves_decode(changes, D1), "it is changed itself, and another one stays"
    changes.by_load = D1, Role.PREFILL
    assert not leaves_decode(changes, D0)
    assert changes.leaves_one(views(), P0, Role.DECODE)
    changes.by_load = P1, Role.DECODE
    assert not changes.leaves_one(views(), P0, Role.DECODE)
    assert changes.leaves_one(views(), P0, Role.MIXED)


def test_a_node_that_was_told_to_leave_is_not_counted_on_until_it_says_so_itself() -> None:
    changes = ChangesUnderWay()
    with changes.of_leaving([], D1):
        assert not leaves_decode(changes, D0)
    assert not leaves_decode(changes, D0)
    assert changes.are_asked(views())
    draining = [
        one if one.incarnation != D1 else replace(one, load=replace(one.load, is_draining=True))
        for one in views()
    ]
    assert not changes.are_asked(draining)
    assert not changes.leaves_one(draining, D0, Role.PREFILL)


def test_a_node_that_is_not_reached_stays() -> None:
    changes = ChangesUnderWay()
    with pytest.raises(NodeLost), changes.of_leaving([], D1):
        raise NodeLost("it is not reached")
    assert leaves_decode(changes, D0)
    assert not changes.are_asked(views())


def test_a_node_that_has_left_is_forgotten() -> None:
    changes = ChangesUnderWay()
    with changes.of_leaving([], D1):
        pass
    assert not changes.are_asked([one for one in views() if one.incarnation != D1])
