"""What measurements of a node alone share: it computes its prompts, and no KV comes to it."""

from __future__ import annotations

from common.ids import Incarnation
from node.flow.landing_place import LandingPlace, Tickets


def tickets_without_kv(node: Incarnation) -> Tickets:
    """Return the tickets of a node that never hands one out."""
    place = LandingPlace(
        node=node,
        kv_endpoint="",
        fingerprint="",
        kv_description="",
        layer_bytes=(),
        lease_s=1.0,
    )
    return Tickets(place, lambda: 1)
