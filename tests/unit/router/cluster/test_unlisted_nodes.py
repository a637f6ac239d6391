"""Warnings of nodes that are heard and have no lease in the store."""

from __future__ import annotations

from common.nodes import Role
from router.cluster.troubles import MAX_NAMED, unlisted_nodes
from tests.support.nodes.listed_nodes import live, membership

DECODE, PREFILL = live("d0", Role.DECODE), live("p0", Role.PREFILL)


def test_nodes_without_a_lease_are_named() -> None:
    assert unlisted_nodes(membership([DECODE, PREFILL], [DECODE, PREFILL])) == []
    (warning,) = unlisted_nodes(membership([DECODE, PREFILL], [DECODE]))
    assert warning == (
        "1 node is heard that the placement store does not list (p0#1): it takes no leases"
    )
    many = [live(f"d{i}", Role.DECODE) for i in range(MAX_NAMED + 2)]
    (warning,) = unlisted_nodes(membership(many, []))
    assert warning.startswith("10 nodes are heard that the placement store does not list (d0#1, ")
    assert "d7#1 and 2 more)" in warning
