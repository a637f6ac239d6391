"""Bodies that arrive: how many at a time, how much of them is held, and whose is let go.

A request takes a seat when its body is whole. Until then it is here, where nobody is kept out: what
comes takes the place of what has stood still the longest, among those of the client that has most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_BODIES = 1024
MAX_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class Arrival:
    """A body of `owner`, of which `num_bytes` have come. `let_go` is called when it has to end."""

    owner: str
    let_go: Callable[[], None]
    num_bytes: int = 0


@dataclass(slots=True)
class _Owner:
    """The bodies of one client; the one that stood still the longest is first."""

    arrivals: OrderedDict[Arrival, None] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ArrivingBodies:
    """All bodies that arrive at a router: at most `max_bodies`, and `max_bytes` of them.

    Each operation takes constant time, but for letting one go, which looks at all clients.
    """

    def __init__(self, *, max_bodies: int = MAX_BODIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_bodies = max_bodies
        self._max_bytes = max_bytes
        self._owners: dict[str, _Owner] = {}
        self.num_bodies = 0
        self.num_bytes = 0

    @property
    def num_owners(self) -> int:
        """Clients of whom a body arrives."""
        return len(self._owners)

    def begin(self, owner: str, let_go: Callable[[], None]) -> Arrival:
        """Return a body that begins to arrive, after another one was let go if there are too many.

        `let_go` is called at most once, and may not call back; the body is ended by then.
        """
        while self.num_bodies >= self._max_bodies:
            self._let_one_go(max(self._owners.values(), key=lambda one: len(one.arrivals)))
        arrival = Arrival(owner, let_go)
        self._owners.setdefault(owner, _Owner()).arrivals[arrival] = None
        self.num_bodies += 1
        return arrival

    def grow(self, arrival: Arrival, num_bytes: int) -> None:
        """Count a part of a body that has not ended; it may itself be one that is let go."""
        owner = self._owners[arrival.owner]
        owner.arrivals.move_to_end(arrival)
        arrival.num_bytes += num_bytes
        owner.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._let_one_go(max(self._owners.values(), key=lambda one: one.num_bytes))

    def end(self, arrival: Arrival) -> None:
        """Forget a body that is whole, or whose request has ended. Idempotent."""
        owner = self._owners.get(arrival.owner)
        if owner is None or arrival not in owner.arrivals:
            return
        del owner.arrivals[arrival]
        owner.num_bytes -= arrival.num_bytes
        self.num_bytes -= arrival.num_bytes
        self.num_bodies -= 1
        if not owner.arrivals:
            del self._owners[arrival.owner]

    def _let_one_go(self, owner: _Owner) -> None:
        victim = next(iter(owner.arrivals))
        self.end(victim)
        victim.let_go()
