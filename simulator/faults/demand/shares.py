"""How often histories have each of their parts: as usual, or densely in one of several ways. Pure.

Most faults that are left need several parts at once, which are rare where each part is. So every
second history is dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The shares, from 0 to 1, of the histories that have a part; of `lanes`: weights.

    `staged`, `on_card`: where the caches of nodes are; on cards, of those whose lane allows it.
    `further`: two nodes have several connections for KV, where it travels on ZMQ.
    `upgraded`: all nodes or some are. `loaded`: queues are short. `uneven`: nodes have pools of
    different sizes. `salted`: requests have salts. `under_grammars`: half of them have a grammar.
    `scheduled_otherwise`: nodes schedule by other settings than most do. `wide`: routers know nodes
    as those of a wide cluster. `scored`: requests want log probabilities. `hurried`: most deadlines
    are within what requests take.
    """

    lanes: Mapping[str, int]
    further: float
    staged: float
    on_card: float
    upgraded: float
    loaded: float
    uneven: float
    salted: float
    under_grammars: float
    scheduled_otherwise: float
    wide: float
    scored: float
    hurried: float


class Way(NamedTuple):
    """One way in which histories are drawn; with `is_calm` nothing breaks in them."""

    shares: Shares
    is_calm: bool = False


USUAL = Shares(
    lanes={"zmq": 6, "rdma_read": 5, "rdma": 5, "ipc": 2, "shm": 2},
    further=0.5,
    staged=0.2,
    on_card=0.3,
    upgraded=0.15,
    loaded=0.35,
    uneven=0.3,
    salted=0.4,
    under_grammars=0.3,
    scheduled_otherwise=0.4,
    wide=0.2,
    scored=0.25,
    hurried=0.0,
)
DENSE = replace(
    USUAL,
    further=0.8,
    loaded=0.5,
    uneven=0.5,
    salted=0.5,
    under_grammars=0.8,
    scheduled_otherwise=0.7,
    wide=0.4,
    scored=0.4,
)
HURRIED = replace(DENSE, hurried=1.0)
ON_CARDS = replace(
    DENSE, lanes={"zmq": 3, "rdma_read": 3, "ipc": 5}, staged=0.0, on_card=1.0, upgraded=0.4
)
CHANGED = replace(DENSE, upgraded=0.5)
WAYS = (
    Way(USUAL, is_calm=True),
    Way(DENSE),
    Way(USUAL),
    Way(HURRIED),
    Way(USUAL),
    Way(ON_CARDS),
    Way(USUAL),
    Way(CHANGED, is_calm=True),
)
"""The ways of eight seeds that follow each other."""


def way_of(seed: int) -> Way:
    """Return how the history of a seed is drawn."""
    return WAYS[seed % len(WAYS)]
