"""Why no node can finish an answer: what is heard, and what the store lists."""

from __future__ import annotations

import pytest

from common.nodes import Role
from common.version import PROTOCOL_VERSION
from placement.store import LiveNode
from router.core.membership import Membership
from router.dispatch.missing_nodes import what_is_missing
from tests.support.nodes.listed_nodes import LEASE_S, live, membership

DECODE, PREFILL = live("d0", Role.DECODE), live("p0", Role.PREFILL)


@pytest.mark.parametrize(
    ("heard", "listed", "words"),
    [
        ([], [], "no decode or mixed node is heard, the placement store lists none"),
        (
            [PREFILL],
            [],
            "no decode or mixed node is heard, 1 prefill node is, the placement store lists none",
        ),
        (
            [PREFILL, live("p1", Role.PREFILL)],
            [PREFILL, DECODE],
            "no decode or mixed node is heard, 2 prefill nodes are, "
            "the placement store lists 2 nodes of this model",
        ),
        (
            [],
            [live("d0", Role.DECODE, model="llama")],
            "no decode or mixed node is heard, nodes serve llama, this router m",
        ),
        (
            [],
            [
                live("d0", Role.DECODE, protocol=PROTOCOL_VERSION + 2),
                live("p0", Role.PREFILL, protocol=1),
            ],
            "no decode or mixed node is heard, "
            "the placement store lists 2 nodes of another protocol version",
        ),
        (
            [],
            [live("d0", Role.DECODE, tokens="u")],
            "no decode or mixed node is heard, "
            "the placement store lists 1 node with another tokenizer",
        ),
        (
            [live("d0", Role.DECODE, is_draining=True)],
            [],
            "every decode or mixed node is draining",
        ),
    ],
)
def test_what_is_missing(heard: list[LiveNode], listed: list[LiveNode], words: str) -> None:
    nodes = membership(heard, listed)
    assert what_is_missing(nodes.nodes(), nodes) == words


def test_a_store_that_is_away_is_named() -> None:
    nodes = Membership(model="m", lease_s=LEASE_S)
    nodes.on_store_away(0.0)
    missing = what_is_missing([], nodes)
    assert missing == "no decode or mixed node is heard, the placement store is away"
