"""Which nodes a membership says are suspected, for requests that come meanwhile."""

from __future__ import annotations

from placement.store import LiveNode
from router.core.membership import Membership
from tests.support.nodes.node_views import node


def test_suspects_are_known_until_they_are_trusted_lost_or_forgotten() -> None:
    membership = Membership(model="m", lease_s=10.0)
    views = [node(name) for name in ("a", "b", "c")]
    a, b, c = (view.incarnation for view in views)
    membership.on_listing([LiveNode(record=one.record, load=one.load) for one in views], 0.0)
    for one in (a, b):
        membership.on_heard(one)
    membership.on_suspected(a, "silent", is_heard=False)
    membership.on_heard(b, unreached="unreached")
    membership.on_suspected(c, "silent", is_heard=False)
    assert membership.suspects == {a: False, b: True, c: False}
    membership.on_heard(a, unreached="unreached")
    assert membership.suspects[a]
    membership.on_heard(a)
    membership.on_lost(b, "broken")
    assert membership.suspects == {c: False}
    membership.on_lost(a, "broken")
    for now_s in (5.0, 10.0, 15.0, 20.0):
        membership.on_listing([], now_s)
    assert membership.suspects == {}
