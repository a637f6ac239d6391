"""Why a router is not ready, and what it warns of: what is heard, and what the store lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.nodes import NodeLoad, Role
from common.version import PROTOCOL_VERSION
from placement.store import LiveNode
from router.cluster.troubles import MAX_NAMED, unlisted_nodes, what_is_missing
from router.core.membership import Membership
from tests.support.nodes.node_records import record

LEASE_S = 5.0


def live(
    name: str,
    role: Role,
    *,
    is_draining: bool = False,
    protocol: int = PROTOCOL_VERSION,
    tokens: str = "",
) -> LiveNode:
    load = NodeLoad(
        free_blocks=1,
        free_seats=1,
        num_running=0,
        num_waiting=0,
        queued_tokens=0,
        is_draining=is_draining,
    )
    told = replace(record(name, role, protocol=protocol), tokens=tokens)
    return LiveNode(record=told, load=load)


DECODE, PREFILL = live("d0", Role.DECODE), live("p0", Role.PREFILL)


def membership(heard: Sequence[LiveNode], listed: Sequence[LiveNode]) -> Membership:
    """These are heard, and these are in the store for longer than a lease."""
    membership = Membership(model="m", lease_s=LEASE_S, tokens="t")
    membership.on_listing(heard, 0.0)
    for node in heard:
        membership.on_heard(node.record.incarnation)
    for second in range(1, 10):
        membership.on_listing(listed, float(second))
    return membership


@pytest.mark.parametrize(
    ("heard", "listed", "others", "words"),
    [
        ([], [], [], "no decode or mixed node is heard, the placement store lists none"),
        (
            [PREFILL],
            [],
            [],
            "no decode or mixed node is heard, 1 prefill node is, the placement store lists none",
        ),
        (
            [PREFILL, live("p1", Role.PREFILL)],
            [PREFILL, DECODE],
            [],
            "no decode or mixed node is heard, 2 prefill nodes are, "
            "the placement store lists 2 nodes of this model",
        ),
        (
            [],
            [],
            ["llama"],
            "no decode or mixed node is heard, nodes serve llama, this router m",
        ),
        (
            [],
            [
                live("d0", Role.DECODE, protocol=PROTOCOL_VERSION + 2),
                live("p0", Role.PREFILL, protocol=1),
            ],
            [],
            "no decode or mixed node is heard, "
            "the placement store lists 2 nodes of another protocol version",
        ),
        (
            [],
            [live("d0", Role.DECODE, tokens="u")],
            [],
            "no decode or mixed node is heard, "
            "the placement store lists 1 node with another tokenizer",
        ),
        (
            [live("d0", Role.DECODE, is_draining=True)],
            [],
            [],
            "every decode or mixed node is draining",
        ),
    ],
)
def test_what_is_missing(
    heard: list[LiveNode], listed: list[LiveNode], others: list[str], words: str
) -> None:
    nodes = membership(heard, listed)
    assert what_is_missing(nodes.nodes(), nodes, model="m", others=others) == words


def test_a_store_that_is_away_is_named() -> None:
    nodes = Membership(model="m", lease_s=LEASE_S)
    nodes.on_store_away(0.0)
    missing = what_is_missing([], nodes, model="m", others=[])
    assert missing == "no decode or mixed node is heard, the placement store is away"


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
