"""What nodes are to become counts before they say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import NodeLost
from router.core.known.changes import ChangesUnderWay
from router.core.known.node_view import NodeView
from tests.support.nodes.fluid_cluster import FluidCluster


def views() -> list[NodeView]:
    """Return two prefill and two decode nodes."""
    return [node.view() for node in FluidCluster(2, 2).nodes]


_, _, D0, D1 = (one.incarnation for one in views())


def others(changes: ChangesUnderWay, views: list[NodeView]) -> list[str]:
    return changes.others_that_stay(views, D0)


def test_all_others_stay_whatever_their_roles() -> None:
    assert others(ChangesUnderWay(), views()) == ["n0", "n1", "n3"]


def test_an_earlier_life_of_a_node_is_no_other_one() -> None:
    earlier = views()[2]
    later = replace(earlier, record=replace(earlier.record, epoch=2))
    assert ChangesUnderWay().others_that_stay([earlier, later], later.incarnation) == []


def test_changes_of_roles_are_counted_one_by_one() -> None:
    changes = ChangesUnderWay()
    with changes.of_role():
        with pytest.raises(NodeLost), changes.of_role():
            raise NodeLost("it does not answer")
        assert changes.are_asked(views())
    assert not changes.are_asked(views())


def test_a_node_that_was_told_to_leave_is_not_counted_on_until_it_says_so_itself() -> None:
    changes = ChangesUnderWay()
    with changes.of_leaving([], D1):
        assert others(changes, views()) == ["n0", "n1"]
    assert others(changes, views()) == ["n0", "n1"]
    assert changes.are_asked(views())
    draining = [
        one if one.incarnation != D1 else replace(one, load=replace(one.load, is_draining=True))
        for one in views()
    ]
    assert not changes.are_asked(draining)
    assert others(changes, draining) == ["n0", "n1"]


def test_a_node_that_is_not_reached_stays() -> None:
    changes = ChangesUnderWay()
    with pytest.raises(NodeLost), changes.of_leaving([], D1):
        raise NodeLost("it is not reached")
    assert others(changes, views()) == ["n0", "n1", "n3"]
    assert not changes.are_asked(views())


def test_a_node_that_has_left_is_forgotten() -> None:
    changes = ChangesUnderWay()
    with changes.of_leaving([], D1):
        pass
    assert not changes.are_asked([one for one in views() if one.incarnation != D1])
