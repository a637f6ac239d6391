"""Reads and writes of other nodes' memory, as network cards make them.

A flight reads its bytes at some moment and writes them at a later one. A frozen process does not
delay it. A cut path does; when the path is open again, the bytes arrive, even if the process that
began the flight was told meanwhile that it failed, or is dead. The memory of a dead process is
neither read nor written.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from common.ids import Incarnation
from simulator.faults.contents import Numbers
from simulator.faults.hosts import Paths, ProcessClock
from simulator.timeline import Timeline

GIVEN_UP_S = (0.02, 0.3, 3.0, 10.0)
"""Times after which a card reports a read or a write without progress as failed."""
DISTURBED_S = (0.0, 0.0, 0.05, 0.5, 3.0)
"""Times for which reads and writes between two nodes fail or are late after a break."""
_LATE_S = (0.0, 0.01, 0.1, 1.0, 4.0)
_LATENCIES = (0.3, 1.0, 1.0, 5.0)
"""Durations of a part of a flight, in latencies of the network."""


class MemoryOwner(Protocol):
    """A process whose memory network cards reach."""

    me: Incarnation
    clock: ProcessClock


@dataclass(eq=False, slots=True)
class Flight:
    """A read or a write that `owner` began: bytes of `holder` for `target`."""

    owner: MemoryOwner
    holder: MemoryOwner
    target: MemoryOwner
    take: Callable[[], Numbers]
    put: Callable[[Numbers], bool]
    on_done: Callable[[bool], object]
    values: Numbers | None = None
    is_put: bool = False
    is_waiting: bool = False
    is_told: bool = False
    late_s: float = 0.0


class Flights:
    """The flights between all nodes."""

    def __init__(self, timeline: Timeline, paths: Paths, latency_s: float, seed: int) -> None:
        self._timeline = timeline
        self._paths = paths
        self._latency_s = latency_s
        self._rng = random.Random(f"flights of {seed}")
        self._under_way: list[Flight] = []
        self._disturbed_until_s: dict[frozenset[str], float] = {}

    def begin(
        self,
        owner: MemoryOwner,
        holder: MemoryOwner,
        target: MemoryOwner,
        *,
        take: Callable[[], Numbers],
        put: Callable[[Numbers], bool],
        on_done: Callable[[bool], object],
    ) -> None:
        """Begin a read or a write. `put` returns whether its address is still there; `on_done` is
        called in the owner, once, with whether the bytes were put."""
        flight = Flight(owner, holder, target, take, put, on_done)
        self._under_way.append(flight)
        until_s = self._disturbed_until_s.get(_pair(flight), 0.0)
        if self._timeline.now_s() < until_s:
            self._disturb(flight)
        self._later(flight)

    def flush(self) -> None:
        """Continue the flights whose path is open again."""
        for flight in self._under_way:
            if flight.is_waiting:
                flight.is_waiting = False
                self._later(flight)

    def break_between(self, first: str, second: str) -> None:
        """Fail all flights between two nodes, for a while. Their bytes may arrive nevertheless."""
        pair, span_s = frozenset((first, second)), self._rng.choice(DISTURBED_S)
        self._disturbed_until_s[pair] = self._timeline.now_s() + span_s
        for flight in self._under_way:
            if _pair(flight) == pair:
                self._disturb(flight)

    def _disturb(self, flight: Flight) -> None:
        """Delay a flight; in half of the cases it may fail before."""
        flight.late_s = self._rng.choice(_LATE_S)
        if self._rng.random() < 0.5:
            self._give_up_later(flight)

    def _later(self, flight: Flight) -> None:
        span_s = self._latency_s * self._rng.choice(_LATENCIES)
        self._timeline.after(span_s + flight.late_s, partial(self._go_on, flight))

    def _go_on(self, flight: Flight) -> None:
        holder, target = flight.holder, flight.target
        if not (flight.is_put and flight.owner is target) and not self._is_open(holder, target):
            flight.is_waiting = True
            self._give_up_later(flight)
        elif flight.values is None and holder.clock.is_alive:
            flight.values = flight.take()
            self._later(flight)
        elif flight.values is not None and not flight.is_put and target.clock.is_alive:
            flight.is_put = flight.put(flight.values)
            if flight.is_put:
                self._later(flight)
            else:
                self._end(flight, False)
        elif flight.is_put:
            self._end(flight, True)
        else:
            self._under_way.remove(flight)
            self._give_up_later(flight)

    def _is_open(self, holder: MemoryOwner, target: MemoryOwner) -> bool:
        """Return whether the two reach each other: bytes that arrive are acknowledged."""
        ends = holder.me.node_id, target.me.node_id
        return self._paths.is_open(*ends) and self._paths.is_open(*reversed(ends))

    def _give_up_later(self, flight: Flight) -> None:
        if not flight.is_told:
            span_s = self._rng.choice(GIVEN_UP_S)
            self._timeline.after(span_s, partial(self._tell, flight, False))

    def _end(self, flight: Flight, is_put: bool) -> None:
        if flight in self._under_way:
            self._under_way.remove(flight)
        self._tell(flight, is_put)

    def _tell(self, flight: Flight, is_put: bool) -> None:
        if not flight.is_told:
            flight.is_told = True
            flight.owner.clock.run(partial(flight.on_done, is_put))


def _pair(flight: Flight) -> frozenset[str]:
    return frozenset((flight.holder.me.node_id, flight.target.me.node_id))
