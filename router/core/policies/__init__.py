"""Placement policies by name: each is one pure function in its own file.

query            what a policy sees: nodes with their load, the request, the prefix map
round_robin      each node in turn
least_loaded     the node with the most room
prefix_affinity  the node with the least to do, what it lacks of the prompt included
session_nodes    before every policy: the node that served the session last, unless it is too busy
"""

from __future__ import annotations

from enum import Enum

from router.core.policies.least_loaded import least_loaded
from router.core.policies.prefix_affinity import prefix_affinity
from router.core.policies.query import Policy
from router.core.policies.round_robin import round_robin

POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "prefix_affinity": prefix_affinity,
}


class Narrowing(Enum):
    """Which nodes a policy compares in a cluster that is too wide to look at all."""

    IN_TURN = "a window that moves on with the turns"
    DRAWN = "random ones"
    DRAWN_AND_HOLDERS = "random ones, and those that hold the most of the prompt"


NARROWINGS = {
    "round_robin": Narrowing.IN_TURN,
    "least_loaded": Narrowing.DRAWN,
    "prefix_affinity": Narrowing.DRAWN_AND_HOLDERS,
}
