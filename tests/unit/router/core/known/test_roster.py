"""The nodes that can be chosen, by kind."""

from __future__ import annotations

import dataclasses
import random

from common.ids import Incarnation
from common.nodes import Role
from router.core.known.node_view import NodeView
from router.core.known.roster import Roster
from tests.support.nodes.node_views import node


def any_view(rng: random.Random, node_id: str) -> NodeView:
    view = node(
        node_id,
        rng.choice([Role.PREFILL, Role.DECODE, Role.MIXED]),
        num_requests=rng.choice([0, 9, 10, 11]),
        fingerprint=rng.choice("fg"),
        max_model_len=rng.choice([500, 1000]),
        is_draining=rng.random() < 0.2,
        is_suspected=rng.random() < 0.2,
        has_grammars=rng.random() < 0.5,
    )
    silent = rng.choice([(), (), (Incarnation("d", 1), Incarnation("e", 2))])
    return dataclasses.replace(view, load=dataclasses.replace(view.load, kv_unreachable=silent))


def busier(view: NodeView, rng: random.Random) -> NodeView:
    """A view of the same report and record, as between two listings."""
    num_requests, is_suspected = rng.choice([0, 9, 10, 11]), rng.random() < 0.2
    return dataclasses.replace(view, num_requests=num_requests, is_suspected=is_suspected)


def reported(view: NodeView, rng: random.Random) -> NodeView:
    """A view of the same record with the next report."""
    load = any_view(rng, view.record.node_id).load
    return dataclasses.replace(view, load=load, num_requests=rng.choice([0, 10]))


def described(roster: Roster) -> object:
    """What a roster says, without the order in which it learned it."""
    kinds = []
    for kind in roster.kinds():
        record = kind.record
        facts = record.role.value, record.fingerprint, record.max_model_len, record.has_grammars
        kinds.append((facts, kind.num_nodes, kind.staying, kind.ready, kind.free))
    kinds.sort()
    return kinds, list(roster), roster.unreachable, roster.max_model_len()


def test_whatever_happened_it_is_that_of_its_views() -> None:
    rng, roster = random.Random(3), Roster()
    views: dict[Incarnation, NodeView] = {}
    for _ in range(3000):
        one = any_view(rng, f"n{rng.randrange(40)}")
        if one.incarnation in views and rng.random() < 0.4:
            one = rng.choice([busier, reported])(views[one.incarnation], rng)
        if rng.random() < 0.3:
            roster.discard(one.incarnation)
            views.pop(one.incarnation, None)
        else:
            roster.put(one)
            views[one.incarnation] = one
        if rng.random() < 0.1:
            assert described(roster) == described(Roster(views.values()))
            assert list(roster) == [views[me] for me in sorted(views)]
            longest = [
                view.record.max_model_len
                for view in views.values()
                if view.record.role is not Role.PREFILL and not view.load.is_draining
            ]
            silent = {
                (view.incarnation, decode)
                for view in views.values()
                for decode in view.load.kv_unreachable
            }
            assert roster.unreachable == silent
            assert roster.max_model_len() == max(longest, default=None)


def test_it_is_a_sequence_ordered_by_id() -> None:
    roster = Roster([node("c"), node("a"), node("b")])
    assert [one.record.node_id for one in roster] == ["a", "b", "c"]
    assert (len(roster), roster[1].record.node_id) == (3, "b")
    assert [one.record.node_id for one in roster[:2]] == ["a", "b"]
    assert roster.view(Incarnation("d", 1)) is None
    asked = [Incarnation("c", 1), Incarnation("d", 1), Incarnation("a", 1)]
    assert roster.views(asked) == [roster[2], roster[0]]


def test_where_a_node_stands() -> None:
    """Draining before suspected before full: each is left out of the lists behind it."""
    roster = Roster(
        [
            node("a"),
            node("b", num_requests=10),
            node("c", is_suspected=True),
            node("d", is_draining=True),
        ]
    )
    (kind,) = roster.kinds()
    named = [[me.node_id for me in part] for part in (kind.staying, kind.ready, kind.free)]
    assert named == [["a", "b", "c"], ["a", "b"], ["a"]]
    ready = [me for me in "abcd" if roster.kind_of(Incarnation(me, 1)) is kind]
    assert ready == ["a", "b"]


def test_no_kind_is_left_of_nodes_that_are_gone() -> None:
    roster = Roster([node("a"), node("b", fingerprint="g")])
    roster.put(node("b"))
    assert len(list(roster.kinds())) == 1
    for name in "ab":
        roster.discard(Incarnation(name, 1))
    assert (list(roster.kinds()), len(roster)) == ([], 0)
