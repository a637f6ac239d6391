"""Pairs that are not chosen: what prefill nodes say of decode nodes that do not answer them."""

from __future__ import annotations

import dataclasses

from common.ids import Incarnation
from router.core.effects import Choose
from router.core.known.node_view import NodeView
from router.core.known.roster import Roster
from router.core.placement import Chooser
from tests.support.nodes.node_views import names, node, prefill, query

NO_CHOICE_YET = Choose(None, frozenset())


def chosen(*nodes: NodeView, wanted: Choose = NO_CHOICE_YET) -> tuple[str | None, str | None]:
    chooser = Chooser("least_loaded", 60.0, seed=0)
    found, _ = chooser.choose(Roster(nodes), query(), wanted, 0.0)
    return names(found)


def that_does_not_reach(view: NodeView, *decoders: NodeView) -> NodeView:
    silent = tuple(decoder.incarnation for decoder in decoders)
    return dataclasses.replace(view, load=dataclasses.replace(view.load, kv_unreachable=silent))


def test_no_request_is_placed_on_a_decode_node_that_the_prefill_node_does_not_reach() -> None:
    d0, d1 = node("d0"), node("d1")
    assert chosen(d0, d1, prefill("p0")) == ("d0", "p0")
    assert chosen(d0, d1, that_does_not_reach(prefill("p0"), d0)) == ("d1", "p0")


def test_a_reservation_goes_to_a_prefill_node_that_reaches_it() -> None:
    d0 = node("d0")
    nodes = [d0, that_does_not_reach(prefill("p0"), d0), prefill("p1")]
    wanted = Choose(d0.incarnation, frozenset())
    assert chosen(*nodes, wanted=wanted) == ("d0", "p1")


def test_another_life_of_the_decode_node_is_placed_on() -> None:
    d0 = node("d0")
    other = Incarnation("d0", d0.record.epoch + 1)
    silent = dataclasses.replace(prefill("p0").load, kv_unreachable=(other,))
    assert chosen(d0, dataclasses.replace(prefill("p0"), load=silent)) == ("d0", "p0")


def test_alone_with_a_node_that_it_does_not_reach_nothing_is_handed_off() -> None:
    d0 = node("d0")
    assert chosen(d0, that_does_not_reach(prefill("p0"), d0)) == ("d0", None)
