"""What `/v1/cluster` says of the pairs on which a router places nothing."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

from common.ids import Incarnation
from router.cluster.view import avoided_by_prefill, node_json
from router.core.known.pair_health import Pair
from router.core.known.roster import Roster
from tests.support.clocks.lines_run import lines_run
from tests.support.nodes.node_views import node, prefill


def shown(nodes: Roster, pairs: frozenset[Pair]) -> dict[str, list[tuple[str, int]]]:
    """The decode nodes that are shown as not reached, by node."""
    avoided = avoided_by_prefill(pairs, nodes)
    told: dict[str, list[tuple[str, int]]] = {}
    for one in nodes:
        silent = node_json(one, avoided.get(one.incarnation, ()))["kv_unreachable"]
        told[one.record.node_id] = [cast(Any, tuple(entry.values())) for entry in silent]
    return told


def test_pairs_that_fail_are_shown_with_those_that_a_node_tells_of() -> None:
    told = (Incarnation("d0", 1), Incarnation("d1", 1))
    nodes = Roster([prefill("p0", kv_unreachable=told), prefill("p1"), node("d0"), node("d2")])
    p0, d0, d2 = (Incarnation(name, 1) for name in ("p0", "d0", "d2"))
    assert shown(nodes, frozenset({(p0, d2), (p0, d0)})) == {
        "p0": [("d0", 1), ("d1", 1), ("d2", 1)],
        "p1": [],
        "d0": [],
        "d2": [],
    }


def test_a_pair_with_a_life_that_is_over_is_not_shown() -> None:
    nodes = Roster([prefill("p0"), node("d0")])
    earlier = (Incarnation("p0", 1), Incarnation("d0", 0))
    gone = (Incarnation("p0", 1), Incarnation("d9", 1))
    of_gone = (Incarnation("p0", 0), Incarnation("d0", 1))
    assert shown(nodes, frozenset({earlier, gone, of_gone})) == {"p0": [], "d0": []}


def test_twice_as_many_nodes_cost_twice_as_much() -> None:
    def cost(count: int) -> int:
        nodes = [view for n in range(count) for view in (prefill(f"p{n}"), node(f"d{n}"))]
        roster = Roster(nodes)
        names = product(range(count), range(4))
        pairs = frozenset((Incarnation(f"p{p}", 1), Incarnation(f"d{d}", 1)) for p, d in names)
        return lines_run(lambda: shown(roster, pairs))

    assert cost(80) < 2.5 * cost(40)
